"""GPT-2 of Hugging Face, trained from scratch on lines of text with its tokenizer, collator and schedule.

python gpt2_collator.py
torchrun --nproc-per-node 2 gpt2_collator.py
"""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    get_cosine_schedule_with_warmup,
)

import paceline

CONFIG = {"vocab_size": 400, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
CONFIG |= {"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLMLoss"}
LINES = [line for line in Path(__file__).read_text().splitlines() if line.strip()] * 6


def make_tokenizer():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    special = ["<|endoftext|>"]
    tokenizer.train_from_iterator(LINES, trainers.BpeTrainer(vocab_size=400, special_tokens=special))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=special[0], eos_token=special[0])


class Language(paceline.Task):
    def __init__(self):
        self.tokenizer = make_tokenizer()
        self.collate = DataCollatorForLanguageModeling(self.tokenizer, mlm=False)

    def model(self):
        return GPT2LMHeadModel(GPT2Config(**CONFIG))

    def train_data(self):
        return [self.tokenizer(line + "<|endoftext|>", truncation=True, max_length=64) for line in LINES[:-40]]

    def val_data(self):
        return {"val": [self.tokenizer(line, truncation=True, max_length=64) for line in LINES[-40:]]}

    def loss(self, model, grain):
        # Hugging Face divides by `num_items_in_batch`: 1 gives the sum over tokens.
        return model(**grain, num_items_in_batch=1).loss, (grain.labels[:, 1:] != -100).sum()

    def scheduler(self, optimizer, num_steps):
        return get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=5, num_training_steps=num_steps)


if __name__ == "__main__":
    result = paceline.fit(Language(), global_batch=32, grains=2, epochs=2, lr=3e-3, clip_norm=1.0)
    print(result.metrics)
