"""How fast TSSA is here: against eager, softmax attention and the limit of the machine, in one run."""
