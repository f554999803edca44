"""An NFS emulator on FUSE: several mounts with caches of their own over one folder, as clients of one server.

Each mount is a process (`mount`) whose `client` holds the caches and asks the `server`, the backing folder; the kernel
itself caches nothing. What is modelled, after Linux's NFS client and the documents in nfs(5):

- names, missing names and listings hold while their directory's time is unchanged, which is asked again when its
  attributes are older than `directories` seconds, and whenever the directory is opened (close-to-open);
- a file's attributes and contents hold for `attributes` seconds, and are asked again whenever it is opened; what is
  written reaches the server on close, fsync or stat, or after half a minute;
- a file that another client removed or replaced is ESTALE for whoever has it open; an open by path is tried once more;
  a file removed by its own client while open becomes ``.nfsXXXX``;
- the server's times may be coarse, and of another clock; its operations are counted, and can be made to fail, to fail
  after the work was done, to be slow, or to freeze.

``revalidation="time"`` is the way of sshfs and other FUSE clients instead: names and listings hold for so many seconds,
whatever happens.

Not modelled: delegations, fcntl locks (local, as with ``local_lock=posix``), attribute times that grow (actimeo is
fixed), READDIRPLUS, mmap'ed shared writes. A stale name that exists no more makes O_EXCL fail with a false EEXIST (the
kernel's FUSE looks first; its NFS client does not). It is evidence about the protocol, not about NFS.
"""

from tests.rigs.nfs_emulator.emulator import NfsEmulator, require_fuse, tell, unavailable
from tests.rigs.nfs_emulator.settings import Fault, MountSettings

__all__ = ["Fault", "MountSettings", "NfsEmulator", "require_fuse", "tell", "unavailable"]
