"""Below `creel.wrap`: what the samples of a dataset that declares nothing are seen to read.

`wrap` makes the object that stands in for the dataset. While `wrapped_reads` reads samples, `open`
and its like are replaced (`creel.loader.data.interception`). In the first epoch each file that was
opened is entered in `observed`, sample by sample. The `recorder` appends that to a `journal`, which
all processes share that read the dataset (`recording`). The complete journal makes a `trace`, by
which `creel.loader.data.binding` knows the dataset's objects. Until then a list that the dataset
holds may name them (`lists`).
"""
