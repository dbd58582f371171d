"""Partition plans and the distributed step of matrix optimizers under ZeRO-1 data and tensor parallelism."""
