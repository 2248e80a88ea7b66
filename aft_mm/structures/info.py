"""Entries of mmengine's MessageHub that a metric writes, a checkpoint holds and a command reads."""

#: ``dict(measure='IoU', values={class: value})`` of the last validation or test.
BY_CLASS = 'by_class'
#: Minimum score of a box with the best F1; a checkpoint has it in its ``dataset_meta``, too.
BEST_SCORE = 'best_f1_score'
#: What a published checkpoint and an exported file keep of a checkpoint's ``dataset_meta``.
DATASET_META = ('classes', 'palette', BEST_SCORE)
