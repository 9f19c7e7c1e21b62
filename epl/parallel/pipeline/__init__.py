"""The pipeline engine: runs a schedule (`epl.plan.schedule`) on this device's stages.

transport   how buffers reach another device: c10d groups, or threads of one process (`memory`) for tests
parcel      one value on one edge as one flat buffer: structure, plain Python values and tensors together
mailbox     parcels in order over a transport, receives posted ahead, shapes told only when they change
lanes       who computes a stage: one rank, or several that divide the rows of every micro batch
route       which rows go from which lane to which
bridge      a mailbox between stages of unequal width
stage       one stage: forward and backward of a micro batch, with what must be kept in between
weight      the backward in two halves, input gradients first, for schedules that fill the bubble with the second
executor    takes the actions of this device's list one after the other
"""
