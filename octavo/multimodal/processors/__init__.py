"""Processors of single families, in numpy: images and frames become pixels, sounds become spectrograms.

`image_processors` and `log_mel` are where to begin. Used by the writers of images, videos and sounds.
"""
