"""Models with parts under `split`: wired into `parallelize`.

cutting.py     decides how the parts are split, alike on all ranks, and cuts the parameters of this rank
shared.py      on devices that all TaskGraphs share: what happens around every call of the model, and who shares gradients
loopwords.py   words that ranks say before the loop's own code has them send something
ownrows.py     where ranks have rows of their own: which, in the call or micro batch under way
unlike.py      what ranks give split parts, where it differs in more than its rows
loose.py       split parameters that the code between modules computes with
trampoline.py  the forward of a model until it is cut
leftout.py     arguments that the running forward leaves out, and the recorded one did not
rowmap.py      how the arguments and results of split parts carry the batch, from a recorded forward
foreseen.py    the same decisions without ranks, for `epl.plan`
roworder.py    how rows lie in a dim that has several elements of each
staged.py      split TaskGraphs that are stages of a pipeline
entries.py     `state_dict` and `load_state_dict` of a model that is cut
whole.py       the whole state, gathered and loaded
stepping.py    optimizers that look at more than one element of a parameter at a time
"""
