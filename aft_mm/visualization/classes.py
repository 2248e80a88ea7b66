"""What a classifier makes of its images: class activation maps, features, confusions, mistakes."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from .figures import new_figure

# Names of more classes would overlap; their numbers stand on the axes instead, some of them.
MOST_NAMES = 40
MOST_LEGEND = 20
# Beyond so many classes the numbers do not fit into their fields.
MOST_COUNTS = 20
# Okabe and Ito's, which colour-blind people can tell apart, with as many markers and one more, so
# that 72 classes differ.
COLOURS = ('#000000', '#e69f00', '#56b4e9', '#009e73', '#cc79a7', '#0072b2', '#d55e00', '#999999')
MARKERS = 'osv^DP*X<'


def draw_cams(
    images: Sequence[np.ndarray],
    cams: Sequence[np.ndarray],
    titles: Sequence[str],
    footer: str = '',
) -> Figure:
    """Draw each image, and beside it the image under its class activation map.

    Args:
        images: uint8 [H, W, 3].
        cams: floats [H, W], 0 (dark) to 1 (light).
        titles: What each map is of, such as the class and its probability.
        footer: Small print below the figure.

    Raises:
        ValueError: there is no image, or their numbers or sizes differ.
    """
    if not len(images) or not len(images) == len(cams) == len(titles):
        raise ValueError(
            'images, cams and titles must be as many, and at least one, got '
            f'{len(images)}, {len(cams)} and {len(titles)}'
        )
    pairs = min(3, len(images))
    rows = -(-len(images) // pairs)
    figure = new_figure(3.4 * pairs + 0.8, 2.1 * rows + 0.7, 'Class activation maps', footer)
    axes = figure.subplots(rows, 2 * pairs, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for pair, image, cam, title in zip(axes.reshape(-1, 2), images, cams, titles, strict=False):
        if image.shape[:2] != cam.shape:
            raise ValueError(
                f'cams must have the sizes of their images {list(image.shape[:2])}, '
                f'got {list(cam.shape)}'
            )
        pair[0].imshow(image)
        pair[0].set_title(title, fontsize=7)
        pair[1].imshow(image.mean(-1), cmap='gray', vmin=0, vmax=255)
        picture = pair[1].imshow(cam, cmap='inferno', vmin=0, vmax=1, alpha=0.6)
    bar = figure.colorbar(picture, ax=axes, fraction=0.03, pad=0.01)
    bar.set_label('activation / largest', fontsize=6)
    bar.ax.tick_params(labelsize=6)
    return figure


def draw_features(
    points: np.ndarray,
    labels: np.ndarray,
    names: Sequence[str],
    title: str = 'Features',
    footer: str = '',
) -> Figure:
    """Draw points in the plane, a colour and a marker per class.

    Args:
        points: [N, 2], such as those of t-SNE, whose axes have no unit.
        labels: ints [N].
        names: Of the classes.
        title: Above the figure.
        footer: Small print below it.

    Raises:
        ValueError: points and labels are not as many, or a label has no name.
    """
    _check_labels(labels, names, len(points), 'points')
    figure = new_figure(7, 4.6, title, footer)
    axis = figure.subplots()
    axis.set_aspect('equal', adjustable='datalim')
    for index, name in enumerate(names):
        x, y = points[labels == index].T
        axis.scatter(
            x,
            y,
            s=14,
            color=COLOURS[index % len(COLOURS)],
            marker=MARKERS[index % len(MARKERS)],
            linewidths=0,
            label=name,
        )
    axis.set_xticks([])
    axis.set_yticks([])
    axis.set_xlabel('t-SNE, without a unit', fontsize=7)
    if len(names) <= MOST_LEGEND:
        figure.legend(loc='outside right upper', fontsize=7)
    return figure


def draw_confusion(counts: np.ndarray, names: Sequence[str], footer: str = '') -> Figure:
    """Draw a confusion matrix, rows the true classes, columns the predicted ones.

    The colour is the share of the true class, 0 (dark) to 1 (light); up to 20 classes the fields
    hold the numbers, and the title the accuracy.

    Args:
        counts: ints [K, K], images by true and predicted class.
        names: Of the K classes.
        footer: Small print below the figure.

    Raises:
        ValueError: counts is not [K, K] of as many names.
    """
    counts = np.asarray(counts)
    if counts.shape != (len(names), len(names)) or not len(names):
        raise ValueError(
            f'counts must be [K, K] of the {len(names)} names, got {list(counts.shape)}'
        )
    share = counts / np.maximum(1, counts.sum(1, keepdims=True))
    edge = min(10.0, max(3.5, 0.42 * len(names)))
    accuracy = counts.trace() / max(1, counts.sum())
    figure = new_figure(
        edge + 2.2, edge + 1.6, f'{counts.sum()} images, accuracy {100 * accuracy:.1f} %', footer
    )
    axis = figure.subplots()
    picture = axis.imshow(share, cmap='cividis', vmin=0, vmax=1, interpolation='nearest')
    if len(names) <= MOST_NAMES:
        axis.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
        axis.set_yticks(range(len(names)), names, fontsize=7)
    else:
        axis.tick_params(labelsize=7)
    if len(names) <= MOST_COUNTS:
        for (row, column), count in np.ndenumerate(counts):
            if count:
                axis.text(
                    column,
                    row,
                    str(count),
                    ha='center',
                    va='center',
                    fontsize=6,
                    color='white' if share[row, column] < 0.5 else 'black',
                )
    axis.set_xlabel('predicted class', fontsize=8)
    axis.set_ylabel('true class', fontsize=8)
    bar = figure.colorbar(picture, ax=axis, fraction=0.04, pad=0.01)
    bar.set_label('share of the true class', fontsize=7)
    bar.ax.tick_params(labelsize=6)
    return figure


def most_confident_mistakes(
    probabilities: np.ndarray,
    labels: np.ndarray,
    limit: int,
) -> np.ndarray:
    """Indices of the wrongly classified images, the most probable prediction first.

    Args:
        probabilities: [N, K].
        labels: ints [N], the true classes.
        limit: how many at most.
    """
    predicted = probabilities.argmax(1)
    (wrong,) = (predicted != labels).nonzero()
    order = np.argsort(-probabilities[wrong, predicted[wrong]], kind='stable')
    return wrong[order][:limit]


def draw_titled_images(
    images: Sequence[np.ndarray],
    titles: Sequence[str],
    title: str = '',
    footer: str = '',
    columns: int | None = None,
) -> Figure:
    """Draw images side by side, each under its own title, enlarged without smoothing.

    Args:
        images: uint8 [H, W, 3] or [H, W], sizes may differ.
        titles: One per image.
        title: Above the figure.
        footer: Small print below it.
        columns: Images in a row; by default the grid is as square as it can be.

    Raises:
        ValueError: there is no image, or not as many titles.
    """
    if not len(images) or len(images) != len(titles):
        raise ValueError(
            'images and titles must be as many, and at least one, got '
            f'{len(images)} and {len(titles)}'
        )
    columns = columns or int(np.ceil(np.sqrt(len(images))))
    rows = -(-len(images) // columns)
    # A wide picture, such as lines of text, gets a wide place.
    aspect = max(image.shape[1] / image.shape[0] for image in images)
    figure = new_figure(1.8 * min(3.0, max(1.0, aspect)) * columns, 2.1 * rows + 0.6, title, footer)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis in axes:
        axis.set_axis_off()
    for axis, image, words in zip(axes, images, titles, strict=False):
        axis.imshow(image, cmap='gray', vmin=0, vmax=255, interpolation='nearest')
        axis.set_title(words, fontsize=6)
    return figure


def _check_labels(labels: np.ndarray, names: Sequence[str], count: int, what: str) -> None:
    if len(labels) != count or not count:
        raise ValueError(
            f'labels must be as many as {what}, and at least one, got {len(labels)} and {count}'
        )
    if labels.min() < 0 or labels.max() >= len(names):
        raise ValueError(
            f'labels must be 0 to {len(names) - 1}, the classes with names, got '
            f'{labels.min()} to {labels.max()}'
        )
