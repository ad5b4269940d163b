"""The parts that models are written with. A layer has its mesh, its weight method and its names in the checkpoint.

Used by models, which stay pure mathematics.
"""
