"""Transcription of speech: whole sounds window by window, and sounds that still arrive.

`transcription` and `speech_prompts` are where to begin. Used by the routes of audio and of realtime.
"""
