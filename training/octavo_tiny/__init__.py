"""The generator of the text that octavo-tiny reads, and the scripts that train, export and measure it.
The text generator imports the standard library only; torch and tokenizers are for the training files.
Used by people who want to train the model again, and by the tests of the shipped one.
"""
