"""What can be refused at once: a request that is wrong in itself, and what it names that is not there.

What is there is looked at again where it is used. This needs neither torch nor Lightning, which take seconds to import.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from granite_scu.cli.config_layers import Layers
from granite_scu.config import launcher, settings
from granite_scu.config.errors import UserError
from granite_scu.config.request import Request
from granite_scu.hardware import presets
from granite_scu.storage import checkpoint_list
from granite_scu.storage.run_folder import RunFolder, is_general_text


def refuse(layers: Layers, writes: bool = True, opens: bool = True) -> None:
    """Refuse a request whose fault shows at once.

    Args:
        layers: what is asked for.
        writes: whether a run folder is to be written.
        opens: whether what it names is used.

    Raises:
        UserError: an unknown preset, a value of the wrong kind or out of its range, a file, a text, a model or a
            checkpoint that is not there, a text that is empty, a run folder that is not empty.
    """
    is_known = layers.asked_preset != presets.AUTO  # which one that is, takes a look at the machine
    request = (layers if is_known else replace(layers, asked_preset=None)).request()
    if opens:  # the first process alone writes, and another may start when it has begun to
        check_what_is_there(request, writes and launcher.rank() == 0)


def check_what_is_there(request: Request, writes: bool) -> None:
    """Refuse what a request names that is not there, or is in the way. Raises UserError."""
    from granite_scu.training.early_checks import check_folder, check_loggers  # late: numpy

    run = request.run
    if writes:
        folder = RunFolder(run.output_dir)
        if run.resume:
            checkpoint_list.check_there(folder, run.resume)
        check_folder(folder, request)
        check_loggers(run.loggers, run.logger_offline)
    general = [] if run.resume else request.drift.general_files  # a run that is continued has its text in its folder
    check_data(request.data, general=general)
    settings.check_model(request.base.name)


def check_data(data: settings.DataConfig, begins: bool = True, general: Sequence[str] = ()) -> None:
    """Refuse texts and a chat template that are not there, and texts that are empty or begin with what is wrong.

    Args:
        data: names them.
        begins: whether to read their first documents.
        general: names of general text.

    Raises:
        UserError: the first of them.
    """
    from granite_scu.data.sources import read  # late: numpy

    if data.chat_template is not None:
        settings.check_template(data.chat_template)
    for flag, names in (("--data-dir", data.sources), *data.files.values(), ("--general-data", general)):
        for source in names:
            folder = Path(source.removeprefix(settings.HUB_PREFIX)).expanduser()
            if source.startswith(settings.HUB_PREFIX) and settings.is_path(str(folder)) and not folder.exists():
                raise UserError(f"{flag} {source}: no such folder; a data set of the hub is named hf:owner/name")
            if read.is_path(source):
                with read.named_by(flag):
                    read.check_readable(source)
                    if begins and not (source in general and is_general_text(source)):
                        read.check_beginning(source, data.text_column, data.encoding, data.record_format)
