"""The command line as people meet it: fast help, suggestions, one line per error."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from octavo import __version__
from octavo.__main__ import main as console_script
from octavo.cli.main import _OF_OTHER_ENGINES, COMMANDS, EXIT_ERROR, EXIT_INTERRUPTED, EXIT_USAGE, main
from tests.cli.conftest import Command


def run_octavo(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "check": False} | options
    return subprocess.run([sys.executable, "-m", "octavo", *arguments], **options)


def test_help_is_there_in_a_blink() -> None:
    """Modules, not seconds: importing them is nearly all that it does, and a busy machine has no say. There are 240."""
    code = (
        "import sys; from octavo.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(len(sys.modules) > 300)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_help_loads_nothing_heavy() -> None:
    code = """
import sys
from octavo.cli.main import main
heavy = {"torch", "starlette", "uvicorn", "tokenizers", "transformers", "huggingface_hub", "numpy"}
for command in ([], ["bench"], ["run"], ["serve"]):
    assert main([*command, "--help"]) == 0
    assert not heavy & set(sys.modules), (command, heavy & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_server_starts_its_core_before_anything_else_is_imported() -> None:
    code = """
import sys
from octavo.cli import main as module
class Core(module.SpawnedCore):
    def __init__(self):
        print(sorted({"cyclopts", "msgspec", "asyncio"} & set(sys.modules)))
        super().__init__()
    def discard(self):
        super().discard()
        print(self.process.returncode)
module.SpawnedCore = Core
sys.exit(module.main(sys.argv[1:]))
"""
    started = [sys.executable, "-c", code, "serve", "--no-such-option"]
    done = subprocess.run(started, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split("\n")[:2]) == (EXIT_USAGE, ["[]", "0"]), done.stderr


@pytest.fixture
def _without_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """`octavo serve` starts no process before its command line is read: its end is tested above."""
    monkeypatch.setattr("octavo.cli.main.SpawnedCore", nullcontext)


@pytest.mark.parametrize("words", [["serve", "-h"], ["serve", "--role=prefill"], ["serve", "--role", "decode"]])
def test_what_needs_no_core_starts_none(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.cli.main.SpawnedCore", None)
    monkeypatch.setattr("octavo.cli.main.invoke", lambda *_: 0)
    assert main(words) == 0


def test_help_lists_the_commands(command: Command) -> None:
    shown = command("--help").out
    assert re.findall(r"^  (\w+) ", shown, re.MULTILINE) == [
        "run",
        "chat",
        "serve",
        "proxy",
        "rank",
        "top",
        "simulate",
        "replay",
        "pull",
        "list",
        "rm",
        "quantize",
        "models",
        "explain",
        "bench",
    ]


def test_help_of_a_command_may_be_asked_for_in_front(command: Command) -> None:
    shown = command("help", "pull").out
    assert shown == command("pull", "--help").out
    assert shown.startswith("Usage: octavo pull MODEL [OPTIONS]\n\nDownload")


@pytest.mark.parametrize("arguments", [[], ["bench"], ["top"], ["explain"], ["serve"]])
def test_help_fits_a_narrow_terminal(arguments: list[str], monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    lines = command(*arguments, "--help").out.splitlines()
    assert [line for line in lines if len(line) > 50 and " " in line.strip()] == []
    assert [line for line in lines if line.endswith("-")] == [], "a flag is cut, such as --ssl-"
    assert sum(len(line) for line in lines) > 15 * len(lines), "the column of names leaves no room for their meaning"


def test_ctrl_c_while_words_are_read_prints_no_traceback(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("octavo.cli.main.build_app", interrupt)
    assert command("explain", code=EXIT_INTERRUPTED).err == "\n"


def test_ctrl_c_while_the_command_line_is_imported_prints_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "octavo.cli.main", Interrupted())
    assert console_script() == EXIT_INTERRUPTED
    assert capsys.readouterr().err == "\n"


def test_options_are_grouped_and_tell_their_defaults(command: Command) -> None:
    shown = command("serve", "--help").out
    headings = re.findall(r"^(\w[\w ,]*):$", shown, re.MULTILINE)
    engine = [
        "Model",
        "Checkpoint",
        "Chats",
        "Images and sounds",
        "Vectors",
        "Memory and cache",
        "Scheduling",
        "Speculative decoding",
        "Device",
        "Ranks",
        "Replicas",
    ]
    engine += ["Disaggregated prefill, and KV that is kept", "Logging"]
    assert headings == ["Server", *engine, "Configuration"]
    assert re.search(r"--max-num-seqs INT +Most sequences in one step\. \[default: 256\]", shown)
    assert "--[no-]enable-prefix-caching" in shown
    assert "--[no-]trust-remote-code" in shown


@pytest.mark.parametrize(
    ("arguments", "first"),
    [
        (["run"], "Prompt:\n  MODEL_OR_PROMPT STR "),
        (["chat"], "Prompt:\n  --system STR"),
        (
            ["bench", "latency"],
            "Benchmark:\n  --batch-size STR",
        ),
    ],
)
def test_help_begins_with_what_is_particular_to_the_command(arguments: list[str], first: str, command: Command) -> None:
    assert command(*arguments, "--help").out.split("\n\n")[2].startswith(first)


def test_usage_names_what_a_command_takes_without_a_flag(command: Command) -> None:
    usages = {}
    for name, *_ in COMMANDS:
        usages[name] = command(name, "--help").out.splitlines()[0]
    assert usages["serve"] == "Usage: octavo serve [MODEL] [OPTIONS]"
    assert not [usage for usage in usages.values() if "[ARGS]" in usage]


def test_version_is_the_packages(command: Command) -> None:
    for words in ("--version", "-v", "version"):
        assert command(words).out.strip() == __version__


def test_an_unknown_command_is_found_without_the_modules_of_commands() -> None:
    code = "import sys; from octavo.cli.main import main; main(['serv']); print('cyclopts' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_commands_of_other_engines_are_none_of_octavos() -> None:
    assert not {name for name, *_ in COMMANDS} & set(_OF_OTHER_ENGINES)


@pytest.mark.usefixtures("_without_cores")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serv"], 'Unknown command "serv". Did you mean "serve"?'),
        (["replay"], "RECORDING is missing; `octavo replay --help` shows what it takes"),
        (["quantize"], "MODEL is missing; `octavo quantize --help` shows what it takes"),
        (["quantize", "x"], "OUTPUT is missing; `octavo quantize --help` shows what it takes"),
        (["run", "--image", "x.png", "hi"], "--image: octavo chat takes images: octavo chat MODEL --image FILE"),
        (["quantize", "--source", "x", "--output", "y"], "--source: model and directory come without flags: octavo"),
        (["run", "--bogus", "x"], "Unknown option: --bogus; `octavo run --help` lists them"),
        (["nonsense"], 'Unknown command "nonsense". `--help` lists them'),
        (["--model", "x"], "--model comes before a command; begin with one, as in octavo serve MODEL"),
        (["benchmark"], 'Unknown command "benchmark". Did you mean "bench"?'),
        (["show", "x"], 'Unknown command "show". octavo explain MODEL shows'),
        (["bench", "latncy"], 'Did you mean "latency"?'),
        (["serve", "--max-num-seq", "3"], "Unknown option: --max-num-seq. Did you mean --max-num-seqs?"),
        (["run", "x", "--temprature", "1"], "Did you mean --temperature?"),
        (["serve", "--temprature", "1"], "temperature is a field of requests: a client of the server sends it"),
        (["serve", "--min-tokens", "1"], "min_tokens is a field of requests"),
        (
            ["serve", "--port", "many"],
            "--port is 'many', expected a whole number, at least 0, at most 65,535; `octavo serve --help` shows",
        ),
        (["run", "x", "--top-k", "1.5"], "--top-k is '1.5', expected a whole number"),
        (["run", "x", "--temperature", "hot"], "--temperature is 'hot', expected a number, at least 0"),
        (
            ["run", "x", "--stop-token-ids", "1", "--stop-token-ids", "1.5"],
            "--stop-token-ids is '1.5', expected a whole",
        ),
        (["bench", "latency", "--input-len", "1.5"], "--input-len is '1.5', expected a whole number"),
        (["bench", "serve", "--num-requests", "3"], "--num-requests: this command calls it --num-prompts"),
        (["serve", "--max-model-len", "1.0005k"], "--max-model-len is '1.0005k', expected a whole number"),
        (
            ["serve", "--max-model-len", "auto"],
            "--max-model-len auto: by default it is what the checkpoint was",
        ),
        (["serve", "--shutdown-timeout", "3"], "--shutdown-timeout: octavo calls it --shutdown-timeout-s"),
        (["serve", "--enable-prompt-adapter"], "--enable-prompt-adapter: prompt adapters are not there yet"),
        (["serve", "--speculative-model", "x"], "--speculative-model: give speculative_config"),
        (["serve", "-tp", "2"], "-tp: octavo calls it --tensor-parallel-size"),
        (["serve", "-c", "2048"], "-c: octavo calls it --max-model-len"),
        (["serve", "--num-scheduler-steps", "8"], "--num-scheduler-steps: octavo calls it --max-steps-in-flight"),
        (["serve", "-hf", "owner/model"], "-hf: octavo calls it --model"),
        (["serve", "-ngl", "99"], "-ngl of llama.cpp: a model is on one device as a whole: choose it with --device"),
        (["top", "--port", "1"], "--port: the server is named by its address: --url http://127.0.0.1:8000"),
        (["explain", "--host", "x"], "Unknown option: --host; `octavo explain --help` lists them"),
        (["serve", "--batch-size=4"], "--batch-size: octavo calls it --max-num-batched-tokens"),
        (["run", "x", "--temp", "1"], "Did you mean --temperature?"),
        (
            ["run", "Once", "upon", "a", "time"],
            "'a time' is more than this command takes; put several words into quotes",
        ),
        (
            ["serve", "octavo-tiny", "--served-model-name=one", "two"],
            "'two' is more than this command takes; put several words into quotes, and give an option once for each",
        ),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(arguments: list[str], message: str, command: Command) -> None:
    captured = command(*arguments, code=EXIT_USAGE)
    assert captured.out == ""
    assert captured.err.startswith("octavo: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.usefixtures("_without_cores")
@pytest.mark.parametrize("name", [["serve"], ["proxy", "--decode", "127.0.0.1:9"]])
def test_a_port_that_is_in_use_is_all_that_is_said(name: list[str], command: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        said = command(*name, "--port", str(used.getsockname()[1]), code=EXIT_ERROR).err
    assert said.startswith("octavo: cannot listen on 127.0.0.1:")
    assert said.count("\n") == 1


@pytest.mark.usefixtures("_without_cores")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "x", "--max-num-seqs", "0"], "max_num_seqs is 0, must be at least 1"),
        (["run", "x", "--temperature", "-1"], "temperature is -1.0, must be at least 0"),
        (["serve", "--port", "70000"], "port is 70000, must be at most 65535"),
        (["explain", "--config", "/nowhere.yaml"], "cannot read the configuration file /nowhere.yaml"),
        (["run", "x", "--model", "/nowhere"], "/nowhere"),
        (["run", "Once upon", "a time"], "'Once upon' before the prompt names no model"),
        (["run", "octavo-tiny", "x", "--model", "y/z"], "there are two models, octavo-tiny and --model y/z"),
        (["bench", "latency", "--batch-size", "0"], "batch_size is 0, must be at least 1"),
        (["run-batch", "-i", __file__, "-o", "/nowhere/out"], "output_file is '/nowhere/out', which cannot be written"),
        (["run-batch", "-i", __file__, "-o", "/"], "output_file is '/', which cannot be written"),
    ],
)
def test_an_error_is_one_line_and_a_non_zero_exit(arguments: list[str], message: str, command: Command) -> None:
    captured = command(*arguments, code=EXIT_ERROR)
    assert captured.err.startswith("octavo: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_a_wrong_variable_is_an_error_of_every_command(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.setenv("OCTAVO_MAX_SEQS", "3")
    assert "did you mean OCTAVO_MAX_NUM_SEQS?" in command("run", "x", code=EXIT_ERROR).err


def test_python_dash_m_octavo_is_octavo() -> None:
    assert run_octavo("--version").stdout.strip() == __version__


def test_every_command_is_where_the_table_says() -> None:
    from octavo.cli import main as module

    folder = Path(module.__file__).parent
    for _, target, _ in module.COMMANDS + module.BENCHMARKS:
        assert (folder / f"{target.partition(':')[0].rpartition('.')[2]}.py").is_file()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_a_full_disk_under_standard_output_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = run_octavo("--help", stdout=full)
    assert done.returncode == EXIT_ERROR
    assert done.stderr.startswith("octavo: standard output cannot be written: No space left on device")
    assert done.stderr.count("\n") == 1


def test_streams_that_the_caller_has_closed_are_no_errors() -> None:
    line = ["sh", "-c", '"$0" -m octavo list >&-; echo $?; "$0" -m octavo run <&-', sys.executable]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("0\n", EXIT_ERROR)
    assert done.stderr.splitlines()[-1].startswith("octavo: the prompt is empty")
    assert "Traceback" not in done.stderr


def test_a_terminal_without_utf_8_gets_similar_characters() -> None:
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}
    line = ["simulate", "--num-requests", "3", "--replicas", "2", "--arrivals", "at-once"]
    done = run_octavo(*line, env=ascii_only)
    assert (done.returncode, done.stderr.count("Error")) == (0, 0)
    assert done.stdout.isascii()


def test_several_engines_of_a_proxy_may_follow_one_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["proxy", "octavo-tiny", "--prefill", "127.0.0.1:1", "127.0.0.1:2"]) != 0
    assert "no decode engine is named; name one with --decode" in capsys.readouterr().err
