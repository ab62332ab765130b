"""A Hugging Face Trainer, as it is:  gpurun run hf_trainer.py --devices cpu:2

It needs: pip install transformers accelerate

It knows nothing of gpurun. Steps are those of its optimizer; evaluation and saving between two steps
belong to the second of them.
"""

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

STEPS = 40


def main() -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    rows = [
        {"input_ids": torch.randint(50, (8,)), "attention_mask": torch.ones(8), "labels": index % 2}
        for index in range(200)
    ]
    use_cpu = not torch.cuda.is_available()
    arguments = TrainingArguments(
        output_dir="out",
        max_steps=STEPS,
        per_device_train_batch_size=4,
        use_cpu=use_cpu,
        ddp_backend="gloo" if use_cpu else "nccl",
        report_to=[],
        save_strategy="no",
    )
    trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=rows)
    trainer.train()
    print("world size", arguments.world_size, "steps", trainer.state.global_step)


if __name__ == "__main__":
    main()
