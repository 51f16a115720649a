"""The same as ../gpt2_collator.py in Lightning."""

from pathlib import Path

import lightning as L
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader
from transformers import (
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    get_cosine_schedule_with_warmup,
)

CONFIG = {"vocab_size": 400, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
CONFIG |= {"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLMLoss"}
LINES = [line for line in Path(__file__).read_text().splitlines() if line.strip()] * 6


def make_tokenizer():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    special = ["<|endoftext|>"]
    tokenizer.train_from_iterator(LINES, trainers.BpeTrainer(vocab_size=400, special_tokens=special))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=special[0], eos_token=special[0])


class Language(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = GPT2LMHeadModel(GPT2Config(**CONFIG))

    def training_step(self, batch, number):
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, number):
        tokens = (batch["labels"][:, 1:] != -100).sum()
        self.log("val/loss", self.model(**batch).loss, batch_size=int(tokens), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        steps = self.trainer.estimated_stepping_batches
        scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=5, num_training_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Lines(L.LightningDataModule):
    def __init__(self):
        super().__init__()
        self.tokenizer = make_tokenizer()
        self.collate = DataCollatorForLanguageModeling(self.tokenizer, mlm=False)

    def train_dataloader(self):
        data = [self.tokenizer(line + "<|endoftext|>", truncation=True, max_length=64) for line in LINES[:-40]]
        return DataLoader(data, 32 // self.trainer.world_size, shuffle=True, collate_fn=self.collate)

    def val_dataloader(self):
        data = [self.tokenizer(line, truncation=True, max_length=64) for line in LINES[-40:]]
        return DataLoader(data, 16, collate_fn=self.collate)


if __name__ == "__main__":
    L.seed_everything(0)
    trainer = L.Trainer(max_epochs=2, gradient_clip_val=1.0)
    trainer.fit(Language(), Lines())
    print(trainer.callback_metrics)
