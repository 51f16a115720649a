"""A config of RETURNN: LSTM encoder and decoder with attention, on the toy data of examples/translation/toy_data.py.

python examples/translation/toy_data.py toy_text_data
python examples/returnn/rnn.py examples/returnn/attention.py
"""

from paceline.translation import Translation  # noqa: F401

train = {"class": "TranslationDataset", "path": "toy_text_data", "file_postfix": "train", "seq_ordering": "laplace:8"}
dev = {"class": "TranslationDataset", "path": "toy_text_data", "file_postfix": "dev", "seq_ordering": "sorted"}

network = {
    "source_embed": {"class": "linear", "activation": None, "n_out": 64},
    "lstm0_fw": {"class": "rec", "unit": "nativelstm2", "n_out": 64, "direction": 1, "from": ["source_embed"]},
    "lstm0_bw": {"class": "rec", "unit": "nativelstm2", "n_out": 64, "direction": -1, "from": ["source_embed"]},
    "encoder": {"class": "copy", "from": ["lstm0_fw", "lstm0_bw"]},
    "output": {
        "class": "rec",
        "from": [],
        "target": "classes",
        "unit": {
            "output": {"class": "choice", "target": "classes", "beam_size": 4, "from": ["output_prob"]},
            "s": {"class": "rnn_cell", "unit": "LSTMBlock", "from": ["target_embed", "att"], "n_out": 64},
            "output_prob": {
                "class": "softmax",
                "from": ["readout"],
                "dropout": 0.0,
                "loss": "ce",
                "loss_opts": {"label_smoothing": 0.1},
            },
        },
    },
}

batch_size = 1000
max_seqs = 100
max_seq_length = 75
num_epochs = 6
adam = True
learning_rate = 0.01
learning_rate_control = "newbob"
newbob_relative_error_threshold = -0.01
gradient_clip_global_norm = 1.0
model = "net-model/attention"
log_verbosity = 3
