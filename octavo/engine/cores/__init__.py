"""Engine cores in other processes and on other machines, as a front has them.

`replicas` and `dispatch` are the front's side, `core_process` is the core's. `split` hands prompts from prefill to
decode cores, and `hub` lets several API servers share the cores. Used by AsyncLLM and the server.
"""
