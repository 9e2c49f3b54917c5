"""A local folder for what writes to a disk alone, such as event files of TensorBoard and traces."""

import shutil
import tempfile
from pathlib import Path

from jaxformer.files import ConfigError, is_remote, replacing


class LocalFolder:
    """`path` is a folder on the disk: `folder` itself, or for a URL a temporary one, whose files
    are put there by `close`. Until then, and after a kill, the store has none of them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder
        if is_remote(folder):
            self.path = Path(tempfile.mkdtemp(prefix="jaxformer-"))

    def close(self) -> None:
        """Puts the files into the store, and removes the temporary folder. Raises ConfigError,
        which names that folder, where they cannot be put; then it stays."""
        if self.path == self.folder:
            return
        try:
            for file in sorted(path for path in self.path.rglob("*") if path.is_file()):
                target = self.folder / file.relative_to(self.path).as_posix()
                with replacing(target) as copy:
                    copy.write(file.read_bytes())
        except ConfigError as error:
            raise ConfigError(f"{error} The files are in {self.path}.") from error
        shutil.rmtree(self.path, ignore_errors=True)
