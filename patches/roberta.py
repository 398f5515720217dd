"""RoBERTa: a learned table of positions, whose first rows are for padding."""

from hf_posenc.patches.family import add_family

add_family("roberta", globals())
