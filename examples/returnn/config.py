"""A config of RETURNN for a small task. Only `Recall` is not as it was there: it is model, data and loss in one."""

from recall import Recall  # noqa: F401

use_horovod = False
horovod_reduce_type = "param"
horovod_param_sync_step = 5
horovod_dataset_distribution = "shard"

train = {"class": "Recall", "seq_ordering": "laplace:4"}
dev = {"class": "Recall", "seq_ordering": "sorted"}
batch_size = 200  # frames of one worker, padding counted
max_seqs = 20
num_epochs = 3

optimizer = {"class": "sgd", "momentum": 0.9}
learning_rate = 0.5
learning_rate_control = "newbob"
learning_rate_decay = 0.5
newbob_relative_error_threshold = -0.01
gradient_clip_global_norm = 5.0

model = "net-model/network"
log_verbosity = 3
