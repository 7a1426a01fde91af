"""Training: loss, optimizer, state, step, loop, evaluation; import the module which is needed."""
