"""Measurements: ``measure(model, corpus, "anisotropy")`` gives tidy tables."""

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
from torch import nn

from analysis_lib import capture, store
from analysis_lib.capture.given import GivenVectors
from analysis_lib.capture.inputs import Settings
from analysis_lib.capture.interventions import Replace
from analysis_lib.capture.source import Source, as_source, unsupported_by
from analysis_lib.corpora import PLURAL, Conversation, Corpus, load_corpus
from analysis_lib.corpora.corpus import item_kind, whole_units
from analysis_lib.errors import (
    CONTINUES,
    AnalysisError,
    in_order,
    require_choice,
    require_extra,
    require_flag,
    require_number,
    require_path,
    require_text,
    require_whole,
)
from analysis_lib.measurement.description import Subject, say, say_left_out, units_of
from analysis_lib.measurement.execution import Workers, results
from analysis_lib.measurement.merging import Merging
from analysis_lib.measurement.parts import WHOLE, Part, PartFile, refuse_part, say_kept
from analysis_lib.measurement.shards import make_shards
from analysis_lib.measurement.stored import Progress, StoredMeasurements, identity
from analysis_lib.measurement.tables import Tables
from analysis_lib.measurement.versions import formulas
from analysis_lib.metrics import resolve
from analysis_lib.metrics.accumulator import Metric
from analysis_lib.metrics.bins import BINS
from analysis_lib.metrics.registry import WANTED
from analysis_lib.models import LoadedModel, load_model
from analysis_lib.models.names import architecture_to_make
from analysis_lib.models.pairs import MEDIA
from analysis_lib.models.parts import Layout, expected_layout
from analysis_lib.progress import bar

# In seconds.
WORKER_TIMEOUT = 60


def measure(
    model: LoadedModel | str | Path | nn.Module,
    data: Corpus | str | Path | Iterable,
    metrics: str | Iterable[str | Metric] = "all",
    *,
    tokenizer: object = None,
    processor: object = None,
    column: str | None = None,
    units: str | None = None,
    special_tokens: bool = True,
    long_texts: str = "cut",
    tokens_per_batch: int = Settings.tokens_per_batch,
    maps: str = Settings.maps,
    intervention: Replace | Sequence[Replace] | None = None,
    tokens: str = Settings.tokens,
    chat_template: str | None = None,
    max_length: int | None = None,
    bins: str | None = None,
    workers: int = 1,
    scheduler: str | None = None,
    worker_timeout: float = WORKER_TIMEOUT,
    checkpoints: Path | str | None = None,
    part: tuple[int, int] | None = None,
    progress: bool = True,
) -> Tables:
    """Measure metrics of a corpus under a model, in one pass.

    Every shard of the corpus is computed with as many threads as PyTorch has in this process
    (``torch.set_num_threads``, ``OMP_NUM_THREADS``; all cores by default), whichever process
    computes it. The result is therefore the same, byte for byte, for any number of workers on this
    machine. On a CPU it is also the same for any number of threads, with three exceptions: weights
    of more than a gigabyte, a model object passed by a program, and interventions that need means
    or other texts. In these cases, and on another processor, sums are added in another order and by
    other kernels. In single precision the tables then agree to 4 parts in 10,000, or to 2
    millionths of a column's root mean square for values that remain after a cancellation (10
    millionths for the ends of intervals); in double precision they agree to 2 parts in 10⁹.

    Workers with more threads than there are cores take turns, at little cost. One thread per worker
    (``OMP_NUM_THREADS=1``) is fastest with as many workers as cores.

    Finished measurements are kept, and reused by later calls with the same model, corpus, settings
    and metric, see :class:`~analysis_lib.measurement.stored.StoredMeasurements`.

    Args:
        model: from ``load_model``, or one of its arguments: a name, a folder, or a model object of
            transformers.
        data: from ``load_corpus``, or one of its arguments: a name, a path, texts in a list or
            Series, a table.
        metrics: names, comma-separated or listed, accumulators such as
            ``metrics.Isotropy(["query"])`` or one of your own, or ``all``, which leaves out metrics
            that are not available (``run["left_out"]`` says why).
        tokenizer, processor: for a model object, the one that prepares its input (give either); for
            other models, see ``load_model``.
        column: the column of texts, if ``data`` is a DataFrame or the like.
        units: the column of a table, in a file or in memory, with the unit of each text, such as
            its document: intervals are over these, see ``load_corpus``.
        special_tokens: whether [CLS] and [SEP] count as vectors and as queries; as keys they always
            do.
        long_texts: ``cut`` or ``window``, see :class:`Settings`.
        tokens_per_batch: number of tokens in a batch, padding included.
        maps: for a convolutional network, ``flatten`` or ``positions``, see :class:`Settings`.
        intervention: changes inside the model, such as ``Replace("residual", layers=[3],
            dimensions=[99])``, or several in a list. If it needs means or other texts, the corpus
            is read once more beforehand.
        tokens: ``all``, or a limit such as ``norm<10x``: only tokens whose hidden vector is shorter
            than 10 times the median norm of its layer, which an additional pass computes;
            ``run["report"]["long"]`` gives the number of tokens left out, by layer.
        chat_template: the template of conversations, in Jinja, in place of the tokenizer's.
        max_length: the number of tokens of a text that are read at once, in place of the model's
            own limit, see :class:`Settings`.
        bins: ``position`` for a table of each bin of positions, of every metric: 1, 2, 3 to 4, 5 to
            8, ..., or ``type`` for one of each type of token, see
            :class:`~analysis_lib.metrics.accumulator.Metric`. A window of a long text has positions
            of its own.
        workers: number of processes on this machine, including this one.
        scheduler: the address of a Dask scheduler (``tcp://...``), instead of ``workers``.
        worker_timeout: seconds without a working worker of the scheduler after which an error is
            raised.
        checkpoints: a folder for the merged sums, written about every minute; an interrupted run
            resumes from there.
        part: measure one part of the corpus alone, such as ``(3, 16)``, the third of sixteen, and
            keep its sums in the folder ``checkpoints``, in a file for
            :func:`~analysis_lib.measurement.parts.merge_parts`. The tables are those of this part.
        progress: whether to show a bar.

    Returns:
        The tables by name, such as ``tables["anisotropy"]``.

    Raises:
        AnalysisError: a model that cannot be captured, vectors that are not finite (the message
            names the layer), too little text, workers that died, or a scheduler that does not
            answer or has no workers left.
    """
    started = time.monotonic()
    metrics = resolvable(metrics, bins)
    _refuse_work(workers, scheduler, worker_timeout, checkpoints, progress)
    settings = Settings(
        special_tokens,
        long_texts,
        tokens_per_batch,
        maps,
        intervention,
        tokens,
        chat_template,
        max_length,
    )
    if part is not None:
        part = Part.of(part)
        refuse_part(part, checkpoints, settings)
    refuse_unchanged(metrics, intervention)
    if tokenizer is not None and processor is not None:
        raise AnalysisError("both tokenizer= and processor= are given: give one of them")
    corpus = load_corpus(data, column=column, units=units)
    refuse_template(corpus, settings.chat_template)
    refuse_unavailable(model, corpus, metrics, settings, workers)
    processor = tokenizer if processor is None else processor
    if isinstance(model, LoadedModel) and processor is not None:
        raise AnalysisError(
            f"{model.name} is loaded with its tokenizer: give another one to load_model"
        )
    model = model if isinstance(model, LoadedModel) else load_model(model, processor=processor)
    model = model.reading(corpus.kind)
    if model.kind != corpus.kind:
        # Its other kinds are those of a processor that has to be read.
        refuse_kind(model.name, model.layout, corpus, model.pair_kinds)
    _refuse_without_effect(model, settings)
    source = as_source(model)
    unavailable = _unavailable_of(source, corpus, metrics, settings, bins)
    many = Workers(workers, scheduler, worker_timeout)
    work = (many, checkpoints, progress, started, bins)
    if part is not None:
        return _measured_part(source, corpus, metrics, settings, unavailable, part, *work)
    return stored_or_measured(source, corpus, metrics, settings, unavailable, *work)


def measure_sensible(
    model: LoadedModel,
    corpus: Corpus,
    metrics: Iterable[str | Metric],
    progress: bool = True,
    workers: int = 1,
) -> Tables:
    """:func:`measure` for the metrics that a model supports; ``run["left_out"]`` has the others."""
    started = time.monotonic()
    settings = Settings()
    model = model.reading(corpus.kind)
    source = as_source(model)
    refuse_kind(model.name, model.layout, corpus)
    metrics = resolve(metrics)
    unsupported = source.unsupported(corpus.items, settings)
    unavailable = _unavailable(metrics, model.layout, settings, unsupported)
    sensible = [metric for metric in metrics if metric.name not in unavailable]
    many = Workers(workers)
    tables = stored_or_measured(
        source, corpus, sensible, settings, {}, many, None, progress, started
    )
    tables.run["left_out"] = unavailable | tables.leave_out_what_fails()
    return tables


def measure_vectors(
    vectors: Mapping[int | str, object] | Sequence | Path | str,
    lengths: Sequence[int] | np.ndarray | torch.Tensor | None = None,
    metrics: str | Iterable[str | Metric] = "all",
    *,
    mask: Sequence | np.ndarray | torch.Tensor | None = None,
    layers: Sequence[int | str] | None = None,
    units: Sequence | None = None,
    bins: str | None = None,
    workers: int = 1,
    checkpoints: Path | str | None = None,
    progress: bool = True,
) -> Tables:
    """Measure given vectors, without a model: every metric that needs only vectors.

    Tables, intervals and kept results are as in :func:`measure`. About 2,000 vectors of a layer are
    in memory at a time, or those of one text: files are mapped. Half precision is summed in single
    precision. Every vector counts, so leave out those that should not, such as that of [CLS]; the
    types of tokens are not known, and ``dimension_means`` calls all of them ``other``. In Llama and
    similar models, the last hidden state of transformers has passed a norm: ``measure`` calls it
    ``final``, and so can you.

    Args:
        vectors: a dictionary by layer, or a list of layers from 0 on, such as the ``hidden_states``
            of transformers. Each layer is an array of numpy or torch, token x width, one text after
            another; or utterance x token x width, with padding after the end of a text; or a list
            of such arrays, one per text or for several texts. Layers are numbers, or names:
            ``layer_3`` for hidden vectors, and ``query_3``, ``key_3``, ``value_3``, token x head x
            dim, or ``final_3``. Or a folder of ``.safetensors`` and ``.npy`` files. A file with one
            array is known by its own name, such as ``layer_3.npy``, and the arrays of other
            safetensors files by theirs. ``layer_3-part_0.npy`` and ``layer_3-part_1.npy`` are
            joined, as are arrays of the same name, in the order of the numbers in the file names.
            Or a folder that vLLM has written (``extract_hidden_states``, with its
            ``ExampleHiddenStatesConnector``): a safetensors file per text, with ``hidden_states``,
            token x layer x width, and ``token_ids``.
        lengths: the number of vectors of each text, in order; 1 for each if a vector stands for a
            whole text. Not needed if each array of a list is a text, or with the shape utterance x
            token x width. In a folder, an array ``lengths``: a file of its own, or in a file with
            vectors, for the texts in it.
        mask: instead of lengths, for vectors utterance x token x width: an array utterance x token,
            1 at each token and 0 at padding, on any side, such as the ``attention_mask`` of a
            tokenizer.
        layers: for a folder of vLLM, which does not say it, the layers in its files, in order, such
            as ``[1, 2, 3]``: numbers, or ``final_3`` for what is behind the last norm.
            :func:`~analysis_lib.measurement.layer_check.check_layers` compares them with a model.
        metrics: see :func:`measure`; ``all`` leaves out metrics that these vectors do not allow.
        units: the unit of each text, such as its document: intervals are over these. In a folder,
            an array ``units``.
        bins, workers, checkpoints, progress: see :func:`measure`; workers need a folder.

    Raises:
        AnalysisError: files that cannot be read; vectors that are not finite (the message names
            file, layer and text) or not floating-point; lengths or a mask that do not fit; two
            names for one layer; layers that do not fit the files; the steps of ``generate``; a
            metric that needs other inputs.

    >>> import numpy as np
    >>> vectors = {0: np.array([[1.0, 0], [0, 1], [1, 0]])}
    >>> tables = measure_vectors(vectors, [2, 1], "anisotropy", progress=False)
    >>> # One pair of three is parallel, two are orthogonal.
    >>> tables["anisotropy"]["cosine"].round(3).tolist()
    [0.333]
    """
    started = time.monotonic()
    metrics = resolvable(metrics, bins)
    _refuse_work(workers, None, WORKER_TIMEOUT, checkpoints, progress)
    given = GivenVectors(vectors, layers)
    texts = given.texts(lengths, mask)
    units = (
        given.stored["units"]
        if units is None
        else in_order("units", units, "the unit of each text, in a list")
    )
    units = whole_units(
        given.name, [None if unit is None or unit != unit else str(unit) for unit in units]
    )
    if units is not None and len(units) != len(texts):
        raise AnalysisError(
            f"{given.name} has {len(texts)} texts and {len(units)} units of texts, given or in its "
            "files: give one for each text"
        )
    corpus = Corpus(f"{len(texts)} texts", texts, kind="vectors", units=units)
    refuse_unavailable(given, corpus, metrics, Settings(), workers)
    unavailable = _unavailable_of(given, corpus, metrics, Settings(), bins)
    work = (Workers(workers), checkpoints, progress, started, bins)
    return stored_or_measured(given, corpus, metrics, Settings(), unavailable, *work)


def _unavailable_of(
    source: Source,
    corpus: Corpus,
    metrics: str | Iterable[str | Metric],
    settings: Settings,
    bins: str | None = None,
) -> dict[str, str]:
    """The metrics that are not available, with the reason, unless they were asked for by name.

    Raises:
        AnalysisError: they were, or none is available.
    """
    unsupported = source.unsupported(corpus.items, settings)
    resolved = resolve(metrics, bins)
    unavailable = _unavailable(resolved, source.model.layout, settings, unsupported)
    if metrics != "all" or len(unavailable) == len(resolved):
        _refuse(source.model.name, unavailable)
    return unavailable


def stored_or_measured(
    source: Source,
    corpus: Corpus,
    metrics: str | Iterable[str | Metric],
    settings: Settings,
    unavailable: dict[str, str],
    workers: Workers,
    checkpoints: Path | str | None,
    progress: bool,
    started: float,
    bins: str | None = None,
) -> Tables:
    """Tables of all available metrics, from kept results and from a measurement of the rest."""
    model = source.model
    accumulators = available(resolve(metrics, bins), unavailable, corpus)
    with StoredMeasurements.of_model(model, corpus, settings).alone() as kept:
        missing = [metric for metric in accumulators if not kept.fill(metric)]
        unfinished = Progress(None)
        if missing and checkpoints is not None:
            unfinished = Progress(checkpoints, identity(model, corpus, missing, settings))
        if missing:
            with _hint_at(unfinished):
                merging = _merged(source, corpus, missing, settings, unfinished, workers, progress)
            merging.close()
            merging.report.require_counted(corpus.name)
            kept.report = kept.report.joined(merging.report)
        subject = Subject.of(model, corpus, settings)
        run = subject.described(kept.report, accumulators, time.monotonic() - started)
        say(model.name, run["notes"])
        kept.write(missing, run)
    tables = Tables(accumulators, kept.report, run, unfinished.path)
    run["left_out"] = dict(unavailable)
    if metrics == "all":
        run["left_out"] |= tables.leave_out_what_fails()
    say_left_out(model.name, run["left_out"])
    return tables


def available(
    metrics: Iterable[Metric], unavailable: Mapping[str, str], corpus: Corpus
) -> list[Metric]:
    """The metrics that can be measured, for the types of tokens of a corpus."""
    types = corpus.token_types
    return [metric.for_types(types) for metric in metrics if metric.name not in unavailable]


def _measured_part(
    source: Source,
    corpus: Corpus,
    metrics: str | Iterable[str | Metric],
    settings: Settings,
    unavailable: dict[str, str],
    part: Part,
    workers: Workers,
    folder: Path | str,
    progress: bool,
    started: float,
    bins: str | None = None,
) -> Tables:
    """The tables of a part, whose sums are kept in a file, or have been kept there before."""
    model = source.model
    accumulators = available(resolve(metrics, bins), unavailable, corpus)
    known = identity(model, corpus, accumulators, settings)
    file = PartFile(folder, part, known)
    subject = Subject.of(model, corpus, settings)
    with store.in_use():
        merging = file.read(accumulators, part.shards(len(corpus)).start)
        if merging is not None:
            say_kept(folder, part)
        else:
            unfinished = Progress(folder, known, part.number, part.count)
            with _hint_at(unfinished):
                work = (unfinished, workers, progress, part)
                merging = _merged(source, corpus, accumulators, settings, *work)
            seconds = time.monotonic() - started
            file.write(merging, subject, unavailable, metrics == "all", seconds)
            unfinished.remove()
    merging.close()
    run = subject.described(merging.report, accumulators, time.monotonic() - started)
    run["part"] = [part.number, part.count]
    run["left_out"] = dict(unavailable)
    say_left_out(model.name, unavailable)
    return Tables(accumulators, merging.report, run)


@contextmanager
def _hint_at(unfinished: Progress) -> Iterator[None]:
    """A context in which a Ctrl-C says whether finished shards are kept."""
    try:
        yield
    except KeyboardInterrupt:
        hint = CONTINUES if unfinished.merged else ""
        raise KeyboardInterrupt(hint) from None


def resolvable(
    metrics: str | Iterable[str | Metric], bins: str | None = None
) -> str | list[str | Metric]:
    """The metrics in a form that can be read more than once.

    Raises:
        AnalysisError: they cannot be resolved.
    """
    metrics = metrics if isinstance(metrics, str) else in_order("metrics", metrics, WANTED)
    if bins is not None:
        require_choice("bins", bins, BINS)
    resolve(metrics, bins)
    return metrics


def refuse_unchanged(metrics: str | list[str | Metric], intervention: object) -> None:
    """Raise an AnalysisError for metrics of changes if there is no intervention."""
    if intervention is not None:
        return
    for metric in resolve(metrics):
        if capture.OUTPUT in metric.needs:
            raise AnalysisError(
                f"{metric.name} is what an intervention changes: give an intervention, or leave it "
                "out"
            )


def _refuse_work(
    workers: int,
    scheduler: str | None,
    worker_timeout: float,
    checkpoints: Path | str | None,
    progress: bool,
) -> None:
    """Raise an AnalysisError for invalid arguments about workers, checkpoints or progress."""
    require_whole("the number of workers", workers, 1)
    require_number("the time-out of workers in seconds", worker_timeout, above=0)
    require_flag("progress", progress)
    if checkpoints is not None:
        require_path("checkpoints", checkpoints)
    if scheduler is not None:
        require_text("the scheduler", scheduler, "its address, as in tcp://HOST:PORT")
        if workers != 1:
            raise AnalysisError("both workers= and scheduler= are given: give one of them")
        require_extra("cluster", "distributed")
    elif worker_timeout != WORKER_TIMEOUT:
        raise AnalysisError("worker_timeout= is of a cluster: give scheduler=, or leave it out")


def refuse_unavailable(
    model: object,
    corpus: Corpus,
    metrics: str | Iterable[str | Metric],
    settings: Settings,
    workers: int = 1,
) -> None:
    """Raise the errors that can be found before a model is loaded or trained.

    Raises:
        AnalysisError: too few workers, or a metric or corpus that does not fit a model trained
            here.
    """
    require_whole("the number of workers", workers, 1)
    resolved = resolve(metrics)
    kind = isinstance(model, str) and architecture_to_make(model)
    # What a model makes of images with texts is known once it is loaded.
    if kind and corpus.kind not in MEDIA:
        layout = expected_layout(kind)
        refuse_kind(model, layout, corpus)
        unavailable = _unavailable(resolved, layout, settings, unsupported_by(layout))
        if metrics != "all":
            _refuse(model, unavailable)


def stored_tables(
    name: str,
    corpus: Corpus,
    metrics: str | Iterable[str | Metric],
    settings: Settings,
    bins: str | None = None,
    **given: str | None,
) -> Tables | None:
    """The tables that ``measure`` has kept for a model, without loading it; None if one is missing.

    Args:
        name: as in ``load_model``.
        corpus, metrics, bins: as in ``measure``.
        given: dtype, processor and device of the model, if not the default ones.
    """
    kept = StoredMeasurements.of_name(name, corpus, settings, **given)
    accumulators = available(resolve(metrics, bins), {}, corpus)
    if metrics == "all" or not all(map(kept.fill, accumulators)):
        return None
    say(name, kept.run["notes"])
    run = kept.run | units_of(corpus) | {"formulas": formulas(accumulators)}
    return Tables(accumulators, kept.report, run)


def _merged(
    source: Source,
    corpus: Corpus,
    metrics: list[Metric],
    settings: Settings,
    unfinished: Progress,
    workers: Workers,
    progress: bool,
    part: Part = WHOLE,
) -> Merging:
    """The sums of the shards of a corpus, or of a part, for empty metrics."""
    wanted = part.shards(len(corpus))
    model = source.model
    merging = unfinished.resume(metrics, wanted.start)
    shards = make_shards(source, corpus, metrics, settings, progress)
    read = [0, *itertools.accumulate(len(shard.items) for shard in shards)]
    before = read[wanted.start]
    # Before the measurement, since each would end it halfway.
    source.refuse_unreadable(corpus.items[before : read[wanted.stop]])
    shown_as = {
        "unit": model.kind,
        "description": f"{model.name} on {corpus.name}",
        "show": progress,
    }
    total = read[wanted.stop] - before
    with bar(total=total, initial=read[merging.stop] - before, **shown_as) as shown:
        whole = True
        try:
            # In the order of the shards, so that the result does not depend on which worker
            # finished first.
            words = "; what is finished is kept" if unfinished.path else ""
            left = shards[merging.stop : wanted.stop]
            with closing(results(left, source, workers, words)) as parts:
                for count, result in parts:
                    whole = False
                    merging.add(count, result)
                    whole = True
                    unfinished.keep(merging)
                    shown.update(read[merging.stop] - before - shown.n)
        except BaseException:
            # A shard stopped halfway would be counted twice. If the disk is full, the first error
            # is the one to report.
            with suppress(AnalysisError):
                if whole:
                    unfinished.keep(merging, now=True)
            raise
    return merging


def refuse_template(corpus: Corpus, template: str | None) -> None:
    """Raise an AnalysisError if a chat template is given for what are no conversations."""
    if template is not None and item_kind(corpus.items) is not Conversation:
        raise AnalysisError(
            f"{corpus.name} holds no conversations: leave the chat template out, or give messages"
        )


def refuse_kind(model: str, layout: Layout, corpus: Corpus, further: Sequence[str] = ()) -> None:
    """Raise an AnalysisError if the corpus holds another kind of items than the model reads.

    Args:
        further: what the model reads besides the kind of its layout.
    """
    if layout.kind != corpus.kind:
        kinds = dict.fromkeys([layout.kind, *further])
        readable = " or ".join(PLURAL[kind] for kind in kinds)
        raise AnalysisError(
            f"{model} reads {readable} and {corpus.name} holds {PLURAL[corpus.kind]}: give "
            f"{readable}, or a model that reads {PLURAL[corpus.kind]}"
        )


def _refuse_without_effect(model: LoadedModel, settings: Settings) -> None:
    """Raise an AnalysisError for settings that have no effect on the model."""
    if settings.maps != Settings.maps and not model.layout.maps:
        raise AnalysisError(
            f"maps is {settings.maps}, which is of convolutional networks, and {model.name} is "
            "none: leave maps out"
        )
    if settings.long_texts != Settings.long_texts and model.kind == "image":
        raise AnalysisError(
            f"long_texts is {settings.long_texts}, and {model.name} reads images, which are not "
            "cut: leave it out"
        )
    longest = settings.max_length
    if longest is None:
        return
    if model.kind != "text":
        raise AnalysisError(
            f"max_length is {longest} tokens, and {model.name} reads {PLURAL[model.kind]}: leave "
            "it out"
        )
    if longest > model.positions:
        raise AnalysisError(
            f"max_length is {longest}, and {model.name} has positions for {model.positions} "
            "tokens: give no more, or a model that computes positions, such as a rotary one"
        )


def _unavailable(
    metrics: list[Metric], layout: Layout, settings: Settings, unsupported: dict[str, str]
) -> dict[str, str]:
    """The metrics that are not available for a model, with the reason.

    Args:
        unsupported: inputs of metrics that the model does not provide, with the reason.
    """
    reasons = {}
    for metric in metrics:
        # A metric with only some of its inputs has fewer rows.
        if metric.needs <= unsupported.keys():
            reasons[metric.name] = unsupported[min(metric.needs)]
    if layout.maps and settings.maps == "flatten":
        for metric in metrics:
            if metric.of_pairs_within_utterances or metric.binned_by is not None:
                reasons[metric.name] = "an image is one vector there, unless maps is positions"
    return reasons


def _refuse(model: str, unavailable: dict[str, str]) -> None:
    if unavailable:
        name, reason = next(iter(unavailable.items()))
        raise AnalysisError(f"{name} makes no sense for {model}: {reason}; leave it out")
