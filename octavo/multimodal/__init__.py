"""Images and sounds become what encoders read: decoded, resampled and measured in the front, which has no torch.

May import core, config and errors. The libraries that decode are imported where they are used (extra `audio`).
"""
