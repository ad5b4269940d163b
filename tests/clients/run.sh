#!/usr/bin/env bash
# Runs clients that are not in the test extra, once each, against a server: octavo serve octavo-tiny --port 8391
# Each ends with exit code 0. Seen: vllm 0.32.0+cpu bench serve, 20 of 20 requests succeed; lm_eval 0.4.13 both models score all
# documents; guidellm 0.8.1 ends with 5 requests and a report.
set -euo pipefail
URL=http://127.0.0.1:8391
MODEL=$(cd "$(dirname "$0")/../.." && pwd)/octavo/builtin/octavo-tiny
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
WORK=$(mktemp -d)
trap 'rm -r "$WORK"' EXIT

vllm bench serve --backend openai-chat --base-url $URL --endpoint /v1/chat/completions --model octavo-tiny \
  --tokenizer "$MODEL" --dataset-name random --random-input-len 64 --random-output-len 16 --num-prompts 20 \
  --request-rate 8

for i in 1 2 3 4; do echo "{\"q\":\"2+$i=\",\"a\":\"$((2 + i))\"}"; done > "$WORK/d.jsonl"
cat > "$WORK/gen.yaml" <<YAML
task: local_gen
dataset_path: json
dataset_kwargs: {data_files: {test: $WORK/d.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{q}}"
doc_to_target: "{{a}}"
generation_kwargs: {until: ["\n"], max_gen_toks: 8}
metric_list: [{metric: exact_match}]
YAML
sed 's/local_gen/local_mc/; s/generate_until/multiple_choice/; /generation_kwargs/d; s/exact_match/acc/
  s/doc_to_target: .*/doc_to_target: 0\ndoc_to_choice: ["3","4"]/' "$WORK/gen.yaml" > "$WORK/mc.yaml"
lm_eval run --model local-completions --tasks local_mc,local_gen --include_path "$WORK" --model_args \
  "model=octavo-tiny,base_url=$URL/v1/completions,tokenizer=$MODEL,num_concurrent=4,tokenized_requests=False"
lm_eval run --model local-chat-completions --tasks local_gen --include_path "$WORK" --apply_chat_template --model_args \
  "model=octavo-tiny,base_url=$URL/v1/chat/completions,num_concurrent=4"

guidellm run --backend "kind=openai_http,target=$URL,model=octavo-tiny" --disable-console-interactive \
  --tokenizer "kind=huggingface_auto,model=$MODEL" --data kind=synthetic_text,prompt_tokens=32,output_tokens=8 \
  --profile kind=synchronous --constraint kind=max_requests,count=5
