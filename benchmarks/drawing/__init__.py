"""Pictures as SVG: charts of simulations, and what recorded runs did step by step.

`benchmarks.draw` and `benchmarks.pictures` are its users. Imports octavo.simulate.
"""
