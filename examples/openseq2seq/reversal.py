"""A config of OpenSeq2Seq: its toy, a tiny Transformer that learns to turn rows of letters around.

python examples/translation/toy_data.py toy_text_data
python examples/openseq2seq/run.py --config_file=examples/openseq2seq/reversal.py --mode=train_eval
python examples/openseq2seq/run.py --config_file=examples/openseq2seq/reversal.py --mode=infer
"""

from open_seq2seq.data.text2text.text2text import ParallelTextDataLayer, SpecialTextTokens
from open_seq2seq.decoders import TransformerDecoder
from open_seq2seq.encoders import TransformerEncoder
from open_seq2seq.losses import PaddedCrossEntropyLossWithSmoothing
from open_seq2seq.models import Text2Text
from open_seq2seq.optimizers.lr_policies import transformer_policy

base_model = Text2Text
width, layers = 64, 2
data = "toy_text_data"

base_params = {
    "use_horovod": False,
    "num_gpus": 1,
    "batch_size_per_gpu": 64,
    "max_steps": 500,
    "print_loss_steps": 50,
    "eval_steps": 250,
    "save_checkpoint_steps": 250,
    "logdir": "runs/reversal",
    "dtype": tf.float32,  # noqa: F821
    "optimizer": tf.contrib.opt.LazyAdamOptimizer,  # noqa: F821
    "optimizer_params": {"beta1": 0.9, "beta2": 0.997, "epsilon": 1e-9},
    "lr_policy": transformer_policy,
    "lr_policy_params": {"learning_rate": 1.0, "warmup_steps": 200, "d_model": width},
    "encoder": TransformerEncoder,
    "encoder_params": {
        "encoder_layers": layers,
        "hidden_size": width,
        "num_heads": 4,
        "filter_size": 2 * width,
        "attention_dropout": 0.0,
        "relu_dropout": 0.0,
        "layer_postprocess_dropout": 0.0,
    },
    "decoder": TransformerDecoder,
    "decoder_params": {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_heads": 4,
        "filter_size": 2 * width,
        "attention_dropout": 0.0,
        "relu_dropout": 0.0,
        "layer_postprocess_dropout": 0.0,
        "beam_size": 5,
        "alpha": 1.0,
        "extra_decode_length": 2,
        "GO_SYMBOL": SpecialTextTokens.S_ID.value,
        "END_SYMBOL": SpecialTextTokens.EOS_ID.value,
        "PAD_SYMBOL": SpecialTextTokens.PAD_ID.value,
    },
    "loss": PaddedCrossEntropyLossWithSmoothing,
    "loss_params": {"label_smoothing": 0.1},
}


def files(part: str) -> dict[str, object]:
    return {
        "source_file": f"{data}/{part}/source.txt",
        "target_file": f"{data}/{part}/target.txt",
        "delimiter": " ",
        "shuffle": part == "train",
        "repeat": part != "test",
        "max_length": 56,
    }


train_params = {"data_layer": ParallelTextDataLayer, "data_layer_params": files("train")}
eval_params = {"data_layer": ParallelTextDataLayer, "data_layer_params": files("dev")}
infer_params = {"batch_size_per_gpu": 16, "data_layer": ParallelTextDataLayer, "data_layer_params": files("test")}
