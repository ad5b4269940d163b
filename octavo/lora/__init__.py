"""Adapters (LoRA) in the worker: PEFT's folders read and checked, and the slots that products take them from.

`ops/lora.py` has the operator; the scheduler says which sequence uses which slot.
"""
