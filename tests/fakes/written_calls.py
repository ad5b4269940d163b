"""The same three calls as models write them, in every format: nested, empty and plain arguments, quotes and unicode."""

from __future__ import annotations

import json
import re

from octavo.server.formats.events import ReadCall

DEEP = '{"a": {"b": [1, {"c": "“ü”\\n\\"x\\" </tool_call>"}]}, "d": ""}'
PYTHONIC = """[f(a={'b': [1, {"c": '“ü”\\n"x" </tool_call>'}]}, d=""), g(), h(s='it\\'s', on=True, off=None)]"""
THREE = [ReadCall("", "f", DEEP), ReadCall("", "g", "{}"), ReadCall("", "h", '{"s": "it\'s", "on": true, "off": null}')]
H = THREE[2].arguments

EACH = f'[{{"name": "f", "arguments": {DEEP}}}, {{"name": "g", "arguments": {{}}}}, {{"arguments": {H}, "name": "h"}}]'


def tagged(call: str, tag: str, joint: str, calls: str = "{}") -> str:
    """Write the calls with each argument between tags; call and tag have NAME, KEY, VALUE, BODY, and IS_STRING."""
    texts = []
    for each in THREE:
        body = ""
        for key, value in json.loads(each.arguments).items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            filled = tag.replace("IS_STRING", "true" if text is value else "false")
            body += filled.replace("KEY", key).replace("VALUE", text) + "\n"
        texts.append(call.replace("NAME", each.name).replace("BODY", body))
    return calls.format(joint.join(texts))


def dsml(calls: str) -> str:
    """Write the calls as DeepSeek does. calls: the name of the tag around them."""
    tag = '<D|parameter name="KEY" string="IS_STRING">VALUE</D|parameter>'
    text = tagged('<D|invoke name="NAME">\nBODY</D|invoke>', tag, "\n", f"<D|{calls}>\n{{}}\n</D|{calls}>")
    return text.replace("D|", "｜DSML｜")


def hunyuan(suffix: str, behind_name: str, line: str) -> str:
    """Write the calls as Hy3 and Hy4 do. suffix: of tags. line: what stands between a key and its value."""
    parts = f"<tool_call>NAME{behind_name}BODY</tool_call>", f"<arg_key>KEY</arg_key>{line}<arg_value>VALUE</arg_value>"
    call, tag, calls = (each.replace(">", f"{suffix}>") for each in (*parts, "<tool_calls>\n{}\n</tool_calls>"))
    return tagged(call, tag, "\n", calls)


def between(begin: str, call: str, end: str, joint: str = "") -> str:
    """Write the calls with their arguments as JSON. call: with NAME and ARGUMENTS."""
    return (
        begin + joint.join(call.replace("NAME", each.name).replace("ARGUMENTS", each.arguments) for each in THREE) + end
    )


def plamo(text: str) -> str:
    """Write marks of PLaMo for words in braces."""
    return re.sub(r"{(\w+)}", r"<|plamo:\1:plamo|>", text)


def gemma(quote: str) -> str:
    """Write the calls as models of Gemma do. quote: the mark on both sides of texts, here the character ~."""
    deep = 'call:f{a:{b:[1,{c:~“ü”\n"x" </tool_call>~}]},d:~~}'
    calls = (f"<|tool_call>{call}<tool_call|>" for call in (deep, "call:g{}", "call:h{s:~it's~,on:true,off:null}"))
    return "".join(calls).replace("~", quote)


TEXTS = {
    "deepseek_v41": dsml("calls").replace("｜DSML｜", "｜DSML｜ "),
    "plamo3": between(
        plamo("{begin_tool_requests}"),
        plamo("{begin_tool_request}{begin_tool_name}NAME{end_tool_name}{begin_tool_arguments}")
        + plamo("<|plamo:constrain|>json<|plamo:msg|>ARGUMENTS{end_tool_arguments}{end_tool_request}"),
        plamo("{end_tool_requests}<|plamo:tag|>"),
    ),
    "step3": tagged(
        "<｜tool_call_begin｜>function<｜tool_sep｜>"
        '<steptml:invoke name="NAME">\nBODY</steptml:invoke><｜tool_call_end｜>',
        '<steptml:parameter name="KEY">VALUE</steptml:parameter>',
        "\n",
        "<｜tool_calls_begin｜>\n{}\n<｜tool_calls_end｜>",
    ),
    "muse": tagged(
        '<atem:invoke name="NAME">\nBODY</atem:invoke>',
        '<atem:parameter name="KEY">VALUE</atem:parameter>',
        "\n",
        " to=f<|message|><atem:function_calls>\n{}\n</atem:function_calls><|eom|>",
    ),
    "dots": tagged(
        '<invoke name="NAME">\nBODY</invoke>',
        '<parameter name="KEY">VALUE</parameter>',
        "\n",
        "<dots_function_call>\n{}\n</dots_function_call>",
    ),
    "gigachat3": between(
        "", '<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "NAME", "arguments": ARGUMENTS}', "<|message_sep|>"
    ),
    "gigachat31": between("", '<|function_call|>{"name": "NAME", "arguments": ARGUMENTS}', "<|message_sep|>"),
    "granite_20b_fc": between("", '<function_call> {"name": "NAME", "arguments": ARGUMENTS}', "", " "),
    "k2_horizon": tagged(
        "<ifm|tool_call>NAME\nBODY</ifm|tool_call>",
        "<ifm|arg_key>KEY</ifm|arg_key>\n<ifm|arg_value>VALUE</ifm|arg_value>",
        "\n",
        "<ifm|tool_calls>\n{}\n</ifm|tool_calls>",
    ),
    "kimi_k3": tagged(
        '<|open|>call tool="NAME" index="1"<|sep|>BODY<|close|>call<|sep|>',
        '<|open|>argument key="KEY" type="object"<|sep|>VALUE<|close|>argument<|sep|>',
        "",
        "<|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>{}<|close|>tools<|sep|><|close|>message<|sep|>",
    ).replace('key="d" type="object"', 'key="d" type="string"'),
    "apertus": f'<|tools_prefix|>[{{"f": {DEEP}}}, {{"g": {{}}}}, {{"h": {H}}}]<|tools_suffix|>',
    "olmo3": "<function_calls>" + PYTHONIC[1:-1].replace("), g(), h", ")\ng()\nh") + "</function_calls>",
    "xlam": EACH,
    "inkling": between(
        "",
        '<|message_model|><|content_invoke_tool_json|>{"name": "NAME", "args": ARGUMENTS}<|end_message|>',
        "<|content_model_end_sampling|>",
    ),
    "minicpm5": tagged('<function name="NAME">\nBODY</function>', '<param name="KEY">VALUE</param>', "\n").replace(
        "it's", "<![CDATA[it's]]>"
    ),
    "mimo": tagged(
        "<tool_call>\n<function=NAME>\nBODY</function>\n</tool_call>", "<parameter=KEY>VALUE</parameter>", "\n"
    ),
    "gemma4": gemma('<|"|>'),
    "functiongemma": gemma("<escape>")
    .replace("<|tool_call>", "<start_function_call>")
    .replace("<tool_call|>", "<end_function_call>"),
    "kimi_k2": "<|tool_calls_section_begin|>"
    + "".join(
        f"<|tool_call_begin|>functions.{call.name}:{place}<|tool_call_argument_begin|>{call.arguments}<|tool_call_end|>"
        for place, call in enumerate(THREE)
    )
    + "<|tool_calls_section_end|>",
    "minimax_m2": tagged(
        '<invoke name="NAME">\nBODY</invoke>',
        '<parameter name="KEY">VALUE</parameter>',
        "\n",
        "<minimax:tool_call>\n{}\n</minimax:tool_call>",
    ),
    "minimax_m3": (
        "N<tool_call>\n"
        'N<invoke name="f">N<a>N<b>N<item>1N</item>'
        'N<item>N<c>“ü”\n"x" </tool_call>N</c>N</item>N</b>N</a>N<d>N</d>N</invoke>\n'
        'N<invoke name="g">N</invoke>\n'
        'N<invoke name="h">N<s>it\'sN</s>N<on>trueN</on>N<off>nullN</off>N</invoke>\n'
        "N</tool_call>"
    ).replace("N<", "]<]minimax[>[<"),
    **{name: dsml(calls) for name, calls in (("deepseek_v32", "function_calls"), ("deepseek_v4", "tool_calls"))},
    "hy_v3": hunyuan("", "<tool_sep>\n", "\n"),
    "hy_v3_suffixed": hunyuan(":opensource", "<tool_sep>\n", "\n"),
    "hy_v4": hunyuan(":opensource", "", ""),
    "seed_oss": tagged(
        "<seed:tool_call>\n<function=NAME>\nBODY</function>\n</seed:tool_call>",
        "<parameter=KEY>VALUE</parameter>",
        "\n",
    ),
    "longcat": f'<longcat_tool_call>\n{{"name": "f", "arguments": {DEEP}}}\n</longcat_tool_call>\n'
    '<longcat_tool_call>{"name": "g", "arguments": {}}</longcat_tool_call>'
    f'<longcat_tool_call>{{"name": "h", "arguments": {H}}}</longcat_tool_call>',
    "phi4_mini": f"functools{EACH}",
    "internlm": "".join(
        f'<|action_start|><|plugin|>\n{{"name": "{call.name}", "parameters": {call.arguments}}}<|action_end|>'
        for call in THREE
    ),
    "hunyuan": f"<tool_calls>{EACH}</tool_calls>",
    "granite": f"<|tool_call|>{EACH}",
    "nemotron": f"<TOOLCALL>{EACH}</TOOLCALL>",
    "lfm2": f"<|tool_call_start|>{PYTHONIC}<|tool_call_end|>",
    "cohere": f'<|START_ACTION|>[{{"tool_call_id": "0", "tool_name": "f", "parameters": {DEEP}}}, '
    f'{{"tool_call_id": "1", "tool_name": "g", "parameters": {{}}}}, '
    f'{{"tool_call_id": "2", "tool_name": "h", "parameters": {H}}}]<|END_ACTION|>',
    "hermes": f'<tool_call>\n{{"name": "f", "arguments": {DEEP}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g"}\n</tool_call>'
    f'<tool_call>{{"name": "h", "arguments": {json.dumps(H)}}}</tool_call>',
    "llama3": f'{{"name": "f", "parameters": {DEEP}}}; {{"name": "g", "parameters": null}}; '
    f'{{"type": "function", "name": "h", "parameters": {H}}}',
    "mistral": f'[TOOL_CALLS][{{"name": "f", "arguments": {DEEP}}}, {{"name": "g", "arguments": {{}}}}, '
    f'{{"arguments": {H}, "name": "h"}}]',
    "mistral_args": f"[TOOL_CALLS]f[ARGS]{DEEP}[TOOL_CALLS]g[ARGS]{{}}[TOOL_CALLS]h[ARGS]{H}",
    "pythonic": PYTHONIC,
    "pythonic_marked": f"<|python_start|>{PYTHONIC}<|python_end|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜>"
    + "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call.name}\n```json\n{call.arguments}\n```<｜tool▁call▁end｜>"
        for call in THREE
    )
    + "<｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜>"
    + "".join(f"<｜tool▁call▁begin｜>{call.name}<｜tool▁sep｜>{call.arguments}<｜tool▁call▁end｜>" for call in THREE)
    + "<｜tool▁calls▁end｜>",
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n"
    + json.dumps(json.loads(DEEP)["a"], ensure_ascii=False)
    + "\n</parameter>\n<parameter=d>\n\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=g>\n</function>\n</tool_call>"
    "\n<tool_call>\n<function=h>\n<parameter=s>\nit's\n</parameter>\n<parameter=on>\nTrue\n</parameter>\n<parameter=off>\nnull\n"
    "</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>"
    + json.dumps(json.loads(DEEP)["a"], ensure_ascii=False)
    + "</arg_value>\n<arg_key>d</arg_key>\n<arg_value></arg_value>\n</tool_call>\n<tool_call>g</tool_call><tool_call>h"
    "<arg_key>s</arg_key><arg_value>it's</arg_value><arg_key>on</arg_key><arg_value>true</arg_value><arg_key>off</arg_key>"
    "<arg_value>null</arg_value></tool_call>",
    "gpt_oss": "<|channel|>analysis<|message|>so<|end|><|start|>assistant"
    + "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>{call.arguments}<|call|>"
        for call in THREE
    ),
}
