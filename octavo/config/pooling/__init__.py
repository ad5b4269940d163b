"""How a checkpoint makes vectors, scores and labels, by its config and the files of libraries that train such.

`pooling_config` and `read_pooling` are where to begin. Used by the front and by poolers of the worker.
"""
