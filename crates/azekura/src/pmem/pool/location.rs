//! The location of a pool: a directory, a partition, and a name.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::base::version_edit::PartitionId;
use crate::base::{KeyOrder, Result};
use crate::engine::{LastVisibleSeqno, SnapshotList};
use crate::mem::persist;
use crate::mem::region::Region;
use crate::pmem::options::PmemOptions;
use crate::pmem::persistence::MappedPoolFile;
use crate::pmem::pool::{PoolFileKind, pool_recovery};
use crate::vfs::fs::PersistenceLevel;
use crate::vfs::{Env, Fs, OpenMode};

/// Bytes copied at a time.
const REGION_COPY_CHUNK_LEN: usize = 1 << 20;

/// Where a pool belongs.
#[derive(Clone)]
pub(crate) struct PoolLocation {
    pub(crate) fs: Arc<dyn Fs>,
    pub(crate) env: Arc<dyn Env>,
    pub(crate) dir: PathBuf,
    pub(crate) partition: PartitionId,
    pub(crate) name: String,
    pub(crate) visible: LastVisibleSeqno,
    pub(crate) snapshots: Arc<SnapshotList>,
    pub(crate) read_only: bool,
    /// Bytes of log that may be replayed into it.
    pub(crate) wal_bytes: u64,
}

impl PoolLocation {
    pub(crate) fn path(&self) -> PathBuf {
        self.dir.join(PoolFileKind::Pool.name(self.partition))
    }

    /// Makes the file of a pool that is used as memory, with nothing in it, under a name that no partition has.
    ///
    /// # Errors
    /// `OutOfSpace` if there is none, and those of the files.
    pub(crate) fn create_file(&self, options: &PmemOptions) -> Result<()> {
        let temporary = self.temporary_path();
        if self.fs.exists(&temporary)? {
            self.fs.remove_file(&temporary)?;
        }
        let file = self.fs.open(&temporary, OpenMode::Create)?;
        let backend = MappedPoolFile::new(Arc::clone(&file), options.reserved_address_len(0))?;
        let mut file_id = [0; 16];
        self.env.random(&mut file_id);
        let order = KeyOrder::bytewise(); // nothing is compared yet
        drop(pool_recovery::create(backend, file_id, order, &options.pool_options(), Arc::clone(&self.snapshots))?);
        file.sync_all()
    }

    /// Gives the file that was [made](PoolLocation::create_file) last the name of this pool, durably.
    pub(crate) fn publish_file(&self) -> Result<()> {
        self.fs.rename(&self.temporary_path(), &self.path())?;
        self.fs.sync_dir(&self.dir)
    }

    /// Removes the file that was named, as far as that can be done, because the partition could not be made.
    pub(crate) fn remove_published_file(&self) {
        let _found_by_the_next_open = self.fs.remove_file(&self.path());
    }

    /// Partitions are numbered from 1 on, and made one at a time.
    fn temporary_path(&self) -> PathBuf {
        self.dir.join(PoolFileKind::Shadow.name(PartitionId(0)))
    }
}

/// Whether files in `dir` are used as memory: where the stores of this process into them survive what the file system
/// says they do.
pub(crate) fn uses_mapped_pools(fs: &dyn Fs, dir: &Path) -> bool {
    match fs.persistence_level(dir) {
        PersistenceLevel::WalOnly => false,
        PersistenceLevel::ProcessCrash => true,
        PersistenceLevel::PowerLoss => persist::can_flush(),
    }
}

/// Writes what a region holds to a new file, and syncs it.
pub(crate) fn copy_region(fs: &dyn Fs, region: &Region, to: &Path) -> Result<()> {
    let target = fs.open(to, OpenMode::Create)?;
    let (len, mut at, mut piece) = (region.len(), 0, vec![0; REGION_COPY_CHUNK_LEN]);
    while at < len {
        let n = piece.len().min(usize::try_from(len - at).unwrap_or(usize::MAX));
        region.read(at, &mut piece[..n]);
        target.write_at(&piece[..n], at)?;
        at += n as u64;
    }
    target.sync_data()
}
