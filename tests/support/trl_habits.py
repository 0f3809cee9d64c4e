"""Trainers of TRL on tiny models, attached to evenstep or as they are in one process."""

import os

import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

import evenstep
from evenstep.integrations.transformers import attach
from support.accelerate_habits import as_launched
from support.told_speeds import told
from support.transformers_habits import BATCH, LENGTH, SAMPLES, WORDS, WORKERS, alone, attempt, of

COMMON = {
    "use_cpu": True,
    "num_train_epochs": 2,
    "learning_rate": 0.1,
    "optim": "sgd",
    "lr_scheduler_type": "linear",
    "report_to": [],
    "save_strategy": "no",
    "logging_steps": 2,
    "disable_tqdm": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "max_length": LENGTH,
}


def tokenizer():
    words = {"<pad>": 0, "<eos>": 1, **{f"w{n}": n for n in range(2, WORDS)}}
    made = Tokenizer(WordLevel(words, unk_token="<eos>"))
    made.pre_tokenizer = WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def model_of(kind=transformers.GPT2LMHeadModel, **options):
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=2 * LENGTH, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0, pad_token_id=0, eos_token_id=1, bos_token_id=1, **options,
    )  # fmt: skip
    return kind(config)


def sentences(number):
    generator = torch.Generator().manual_seed(2 + number)
    for each in range(SAMPLES):
        words = torch.randint(2, WORDS, (3 + each % (LENGTH - 4),), generator=generator)
        yield " ".join(f"w{word}" for word in words.tolist())


def made(run, kind, settings, model, sizes=None, **options):
    """A trainer, which is evenstep's if several workers run."""
    sizes = sizes or {"per_device_train_batch_size": WORKERS * BATCH if run.alone else BATCH}
    arguments = settings(output_dir=run.folder, **COMMON, **sizes)
    trainer = kind(model=model, args=arguments, processing_class=tokenizer(), **options)
    if not run.alone:
        assert attach(trainer, **run.options) is trainer
    try:
        trainer.train()
    except evenstep.EvenstepError:
        trainer.accelerator.free_memory()  # Within a step, workers could not meet for what follows.
        raise
    assert run.alone or trainer._trained.epochs.accumulation == arguments.gradient_accumulation_steps
    return of(trainer) | {"tokens": getattr(trainer, "_total_train_tokens", None)}


def fine_tune(run):
    rows = Dataset.from_dict({"text": list(sentences(0))})
    return made(run, trl.SFTTrainer, trl.SFTConfig, model_of(), train_dataset=rows)


def fine_tune_in_whole_batches(run):
    """Batches of two; TRL gathers metrics in each, which count each token once."""
    rows = Dataset.from_dict({"text": list(sentences(0))[:72]})
    run.options = {"timeout": 60.0, "scheme": told("lb-bsp", [4, 4, 1])}
    sizes = {} if run.alone else {"gradient_accumulation_steps": 8}
    sizes["per_device_train_batch_size"] = 2 * 8 * WORKERS if run.alone else 2
    return made(run, trl.SFTTrainer, trl.SFTConfig, model_of(), sizes, train_dataset=rows)


def prefer(run):
    columns = {"prompt": sentences(0), "chosen": sentences(1), "rejected": sentences(2)}
    rows = Dataset.from_dict({name: list(each) for name, each in columns.items()})
    return made(run, trl.DPOTrainer, trl.DPOConfig, model_of(), ref_model=model_of(), train_dataset=rows)


def prefer_in_whole_batches(run):
    columns = {"prompt": sentences(0), "chosen": sentences(1), "rejected": sentences(2)}
    rows = Dataset.from_dict({name: list(each) for name, each in columns.items()})
    run.options = {**run.options, "whole_batches": True}
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}
    made(run, trl.DPOTrainer, trl.DPOConfig, model_of(), sizes, ref_model=model_of(), train_dataset=rows)


def reward(run):
    rows = Dataset.from_dict({"chosen": list(sentences(1)), "rejected": list(sentences(2))})
    model = model_of(transformers.GPT2ForSequenceClassification, num_labels=1)
    return made(run, trl.RewardTrainer, trl.RewardConfig, model, train_dataset=rows)


ATTACHED = (fine_tune, fine_tune_in_whole_batches, prefer, reward)
"""Those that come to the numbers of one process, within what float32 rounds."""


def compare(run):
    def length(completions, **_):
        return [float(len(each)) for each in completions]

    settings = trl.GRPOConfig(
        output_dir=run.folder, use_cpu=True, per_device_train_batch_size=6, num_generations=2, max_completion_length=4,
        report_to=[], bf16=False, disable_tqdm=True,
    )  # fmt: skip
    rows = Dataset.from_dict({"prompt": list(sentences(0))})
    trainer = trl.GRPOTrainer(
        model=model_of(), args=settings, reward_funcs=length, processing_class=tokenizer(), train_dataset=rows
    )
    attach(trainer, **run.options).train()


MISTAKES = {
    compare: "compares several completions of a prompt",
    prefer_in_whole_batches: "in a Trainer, set whole_batches=False",
}


def every(schemes):
    """What each habit comes to, alone and under each scheme; an error is text."""
    found = alone(ATTACHED)
    as_launched()
    os.environ["HF_HUB_OFFLINE"] = "1"
    for scheme, options in schemes.items():
        for habit in (*ATTACHED, *MISTAKES):
            found[scheme, habit.__name__] = attempt(habit, alone=False, options={"timeout": 60.0, **options})
    return found
