"""What the user calls around and in the loop; it wires the parts of `parallel/`, `data/` and `graph/` together.

Start at parallelize.py, whose body is the table of contents. lazy/, separate/ and cut/ are for models in stages or micro batches, split/
for parts under `split`.
"""
