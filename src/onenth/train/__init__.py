"""The trainer behind `onenth train`: a causal language model from transformers on text files, under ZeRO."""
