"""The words that every package uses: what callers ask for, and the messages between the planes. Everybody imports from
here.

What callers give: prompt, media, prompt_embeds, sampling_params (checked by param), structured_outputs,
request_options, request_limits, pooling, speech, adapter, profiler_config, absent.
What they get: outputs, logprob_list.
Messages: messages (front and core), step (scheduler and workers), block_events, live, step_times; resume.
A request in the core: sequence, beam_search, repetition, cache_key.
Sizes that both planes know: model_shape, cache_limits, arithmetic.
Processes and connections: processes, frames, listening, authentication, rendezvous, launched, light_torch.
Tokenizer files in the layout of tokenizer.json: ranked_tokens finds the kind, of tekken, tiktoken, sentence_pieces;
byte_level.
"""
