"""Training of the models of the experiments, with the Trainer of transformers."""
