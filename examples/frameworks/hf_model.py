"""A Hugging Face model as a workload: dict batches, and a model that returns its loss.

Named in a job file as `workload: hf_model.py:build`; see hf_model.yaml. It needs: pip install transformers
"""

import torch
from transformers import BertConfig, BertForSequenceClassification

from gpurun import Workload


def build(layers: int = 1) -> Workload:
    """The job's `params` arrive here as arguments."""
    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=32,
        # Layers of dropout are off where gradients are compared, but this one is a function's argument.
        attention_probs_dropout_prob=0.0,
    )

    def batch(size: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        tokens = torch.randint(50, (size, 8), generator=generator)
        return {"input_ids": tokens, "attention_mask": torch.ones(size, 8), "labels": tokens[:, 0] % 2}

    # Without `loss`, the model returns it; it is called with the dict's entries as keyword arguments.
    return Workload(BertForSequenceClassification(config), batch, optimizer=torch.optim.AdamW)
