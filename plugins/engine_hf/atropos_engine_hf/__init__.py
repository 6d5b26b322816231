"""An engine that samples from a Hugging Face causal language model, with nothing but torch and transformers."""
