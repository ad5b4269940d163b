"""Adapters (LoRA) in the worker: PEFT's folders are read and checked, and slots hold them for the matrix products.

`ops/lora.py` has the operator; the scheduler says which sequence uses which slot.
"""
