"""The 55 classes of ShapeNetCore v2."""

from collections.abc import Collection

#: WordNet synset of each class, the name of its folder.
SYNSETS = dict(
    airplane='02691156',
    bag='02773838',
    basket='02801938',
    bathtub='02808440',
    bed='02818832',
    bench='02828884',
    birdhouse='02843684',
    bookshelf='02871439',
    bottle='02876657',
    bowl='02880940',
    bus='02924116',
    cabinet='02933112',
    camera='02942699',
    cap='02954340',
    car='02958343',
    cellphone='02992529',
    chair='03001627',
    clock='03046257',
    dishwasher='03207941',
    earphone='03261776',
    faucet='03325088',
    file='03337140',
    guitar='03467517',
    helmet='03513137',
    jar='03593526',
    keyboard='03085013',
    knife='03624134',
    lamp='03636649',
    laptop='03642806',
    mailbox='03710193',
    microphone='03759954',
    microwave='03761084',
    monitor='03211117',
    motorbike='03790512',
    mug='03797390',
    piano='03928116',
    pillow='03938244',
    pistol='03948459',
    pot='03991062',
    printer='04004475',
    remote_control='04074963',
    rifle='04090263',
    rocket='04099429',
    skateboard='04225987',
    sofa='04256520',
    speaker='03691459',
    stove='04330267',
    table='04379243',
    telephone='04401088',
    tin_can='02946921',
    tower='04460130',
    train='04468005',
    trash_bin='02747177',
    vessel='04530566',
    washer='04554684',
)
#: Class of each synset.
CLASS_NAMES = {synset: name for name, synset in SYNSETS.items()}


def class_folder(name: str, there: Collection[str]) -> str | None:
    """Return the existing folder of a class, its name or its synset, or None."""
    return next((folder for folder in (name, SYNSETS.get(name)) if folder in there), None)
