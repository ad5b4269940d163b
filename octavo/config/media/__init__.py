"""The families that read images, videos and sounds, a row for each, and the settings of their processors.

`media_family` and `image_families` are where to begin. Used by the front and by encoders of the models.
"""
