"""A config of OpenSeq2Seq: handwritten digits, large batches with LARC. Only `base_model` is not as it was there."""

from open_seq2seq.data.image2label.image2label import CifarDataLayer  # a name, and no more
from open_seq2seq.optimizers.lr_policies import poly_decay

base_model = "digits"

base_params = {
    "use_horovod": False,
    "num_gpus": 1,
    "batch_size_per_gpu": 64,
    "num_epochs": 2,
    "data_layer": CifarDataLayer,
    "dtype": tf.float32,  # noqa: F821
    "optimizer": "Momentum",
    "optimizer_params": {"momentum": 0.9},
    "lr_policy": poly_decay,
    "lr_policy_params": {"learning_rate": 0.1, "power": 2, "min_lr": 1e-5},
    "larc_params": {"larc_eta": 0.002},
    "print_loss_steps": 5,
    "save_checkpoint_steps": 20,
    "eval_steps": 20,
    "logdir": "runs/openseq2seq-small",
}

eval_params = {"batch_size_per_gpu": 90}
