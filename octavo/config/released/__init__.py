"""Configs and settings as releases have them, in the layout of transformers' classes: a file for each family.

`layouts` is where to begin. Used when a checkpoint is opened, and named by rows of `config/media`.
"""
