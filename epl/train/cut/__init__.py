"""A model that is cut: into stages on different ranks, into micro batches, or both.

model.py     stands in for the model's forward: records, places once, returns lazy values
layout.py    which nodes of a recording run on which stage, and what travels between stages
placing.py   this rank's part of the model: the other parameters lose their bytes, the own ones are reduced, tied, counted
carrier.py   runs the bodies of calls over the stages of the replica, as `epl.train.lazy` asks
work.py      what the stages of this device compute in one step
peers.py     the ranks of one model replica, and how they agree and share values
generation.py  what becomes of `model.generate()`
aside.py     gradients set aside while a step makes others
"""
