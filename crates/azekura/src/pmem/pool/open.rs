//! Opens a pool: finds its files and chooses how it is made durable.
//!
//! A new pool is a mapped file if the file system of the directory is memory, else an image. The manifest says which.
//! If a database was copied to another file system, its mapped pools become images, and the first checkpoint replaces
//! the file by an image.

use std::path::Path;
use std::sync::Arc;

use crate::base::file_format::{FileHeader, FileKind};
use crate::base::{Error, KeyOrder, Result, SeqNo};
use crate::mem::region::{PAGE, Region};
use crate::pmem::options::PmemOptions;
use crate::pmem::persistence::{MappedPoolFile, PersistenceBackend, PoolImage};
use crate::pmem::pool::checkpoint::PoolCheckpointer;
use crate::pmem::pool::engine::{PmemEngine, PoolEngine};
use crate::pmem::pool::location::{PoolLocation, copy_region, uses_mapped_pools};
use crate::pmem::pool::mapped::MappedPoolDurability;
use crate::pmem::pool::{ImageStore, PoolCheckLevel, PoolFileKind, PoolRecoveryReport, pool_recovery};
use crate::pmem::pool_header::{PoolSeqnoField, has_clean_shutdown_mark, read_seqno_field};
use crate::pmem::tree::PoolTree;
use crate::vfs::OpenMode;
use crate::vfs::fs::PersistenceLevel;

/// What the manifest says about the files of a pool.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ManifestPoolInfo {
    pub(crate) created_mapped: bool,
    /// A checkpoint brought everything through this number to the files; there are none if that is nothing, unless it
    /// was made as memory.
    pub(crate) flushed_through: SeqNo,
    /// The file id of the pool; older manifests do not have it.
    pub(crate) file_id: Option<[u8; 16]>,
}

impl ManifestPoolInfo {
    /// Checks that these are the bytes of the pool that the manifest means, of which an image says that all through
    /// `replay_from` is in it.
    ///
    /// # Errors
    /// `Corruption` if they are another pool's, or older than the last checkpoint.
    fn check(&self, region: &Region, replay_from: Option<SeqNo>) -> Result<()> {
        if self.file_id.is_some_and(|known| region_file_id(region).ok() != Some(known)) {
            return Err(Error::corruption("the file belongs to another pool than the manifest says"));
        }
        if replay_from.unwrap_or_default() < self.flushed_through {
            let through = self.flushed_through.0;
            return Err(Error::corruption(format!(
                "the file is older than the manifest, which says that everything through number {through} is in it"
            )));
        }
        Ok(())
    }
}

/// A pool as its files have it, before the order of its keys is known.
pub(crate) struct StoredPool {
    location: PoolLocation,
    files: StoredPoolFiles,
    /// All through the first is in it; perhaps more, through the second.
    seqnos_at_open: (SeqNo, SeqNo),
    /// What is known of its bytes.
    check_level: PoolCheckLevel,
    /// None where there is nothing yet.
    file_id: Option<[u8; 16]>,
}

enum StoredPoolFiles {
    /// An image in a file of its own, none if there is nothing yet.
    Image(Box<ImageStore>, Option<PoolImage>),
    Mapped(MappedPoolFile),
}

impl StoredPool {
    /// Reads the files of a pool.
    ///
    /// # Errors
    /// `Corruption` if they are not what was written, or not what the manifest means; `OutOfSpace` if there is not so
    /// much memory.
    pub(crate) fn read(location: PoolLocation, known: &ManifestPoolInfo, options: &PmemOptions) -> Result<StoredPool> {
        let ManifestPoolInfo { created_mapped: made_as_memory, flushed_through: flushed, .. } = *known;
        let (fs, dir, partition) = (&location.fs, &location.dir, location.partition);
        let path = location.path();
        let is_raw = made_as_memory && !ImageStore::exists(&**fs, dir, partition)?;
        if is_raw && !location.read_only && uses_mapped_pools(&**fs, dir) {
            let open = || {
                let backend =
                    MappedPoolFile::for_existing(fs.open(&path, OpenMode::Write)?, options.reserved_address_len(0))?;
                let notes = read_seqno_fields(backend.region())?;
                known.check(backend.region(), None)?;
                let file_id = region_file_id(backend.region())?;
                Ok((backend, notes, file_id))
            };
            let (backend, (at_open, check_level), file_id) = open().map_err(|error: Error| error.in_file(&path))?;
            // A file of its own kind may lie in that directory.
            if backend.level() == fs.persistence_level(dir) {
                return Ok(StoredPool {
                    location,
                    files: StoredPoolFiles::Mapped(backend),
                    seqnos_at_open: at_open,
                    check_level,
                    file_id: Some(file_id),
                });
            }
        }
        // One that was memory is read as it is, and kept as it is until an image of it is permanent.
        let never_written = !made_as_memory && flushed == SeqNo::ZERO;
        let env = Some(&*location.env);
        let addresses = options.reserved_address_len(location.wal_bytes);
        let (store, loaded) = ImageStore::open(fs, dir, partition, addresses, never_written, location.read_only, env)?;
        let mut file_id = None;
        if let Some(loaded) = &loaded {
            let region = loaded.image.region();
            let checked = known.check(region, (!loaded.is_raw).then_some(loaded.replay_from));
            file_id = Some(checked.and_then(|()| region_file_id(region)).map_err(|error| error.in_file(&path))?);
        }
        let (at_open, check_level) = match &loaded {
            Some(loaded) if loaded.is_raw => {
                let (at_open, check_level) =
                    read_seqno_fields(loaded.image.region()).map_err(|error| error.in_file(&path))?;
                // Where it is memory, and is only looked at. On its way to what is none anything may have become of it.
                let is_at_home = is_raw && location.read_only && uses_mapped_pools(&**fs, dir);
                (at_open, if is_at_home { check_level } else { PoolCheckLevel::Full })
            }
            // Each page has a checksum of its own, and all of them have one.
            Some(loaded) => ((loaded.replay_from, loaded.max_seqno), PoolCheckLevel::StructureOnly),
            None => (Default::default(), PoolCheckLevel::Full),
        };
        let form = StoredPoolFiles::Image(Box::new(store), loaded.map(|loaded| loaded.image));
        Ok(StoredPool { location, files: form, seqnos_at_open: at_open, check_level, file_id })
    }

    /// Reads all of it and believes nothing; how many records there are. What only makes sense in the order of its keys
    /// is left out where that is not `bytewise`.
    ///
    /// # Errors
    /// `Corruption` if it is not what was written.
    pub(crate) fn verify(self, bytewise: bool, options: &PmemOptions) -> Result<u64> {
        match &self.files {
            StoredPoolFiles::Image(_, None) => Ok(0),
            _ if bytewise => {
                let doubted = StoredPool { check_level: PoolCheckLevel::Full, ..self };
                Ok(doubted.open(KeyOrder::bytewise(), options, false)?.approximate_len())
            }
            StoredPoolFiles::Image(_, Some(image)) => self.verify_records(image.region()),
            StoredPoolFiles::Mapped(backend) => self.verify_records(backend.region()),
        }
    }

    fn verify_records(&self, region: &Region) -> Result<u64> {
        let report = pool_recovery::verify_records(region)?;
        check_max_seqno(&report, self.seqnos_at_open.1).map(|()| report.records)
    }

    /// The file id of the pool; none where there is nothing yet.
    pub(crate) fn file_id(&self) -> Option<[u8; 16]> {
        self.file_id
    }

    /// All through the first number is in it; perhaps more, through the second.
    pub(crate) fn seqnos_at_open(&self) -> (SeqNo, SeqNo) {
        self.seqnos_at_open
    }

    /// Whether its file is used as memory.
    pub(crate) fn is_mapped(&self) -> bool {
        matches!(&self.files, StoredPoolFiles::Mapped(_))
    }

    /// Whether what is stored into it survives power loss by itself.
    pub(crate) fn survives_power_loss(&self) -> bool {
        matches!(&self.files, StoredPoolFiles::Mapped(backend) if backend.level() == PersistenceLevel::PowerLoss)
    }

    /// Copies the files, in which nothing changes.
    pub(crate) fn copy_to(&self, dir: &Path) -> Result<()> {
        match &self.files {
            StoredPoolFiles::Image(store, _) => store.copy_to(dir),
            StoredPoolFiles::Mapped(backend) => {
                copy_region(&*self.location.fs, backend.region(), &dir.join(self.file_name()))
            }
        }
    }

    /// Removes the files, of a partition that was deleted.
    pub(crate) fn remove_files(self) {
        match self.files {
            StoredPoolFiles::Image(store, _) => store.remove(),
            StoredPoolFiles::Mapped(_) => drop(self.location.fs.remove_file(&self.location.path())),
        }
    }

    fn file_name(&self) -> String {
        PoolFileKind::Pool.name(self.location.partition)
    }

    /// The tree. One that `is_new` needs all the addresses that it may grow to.
    ///
    /// # Errors
    /// `Corruption` if it is no pool with keys in that order, `OutOfSpace` if there is no memory.
    pub(crate) fn open(self, order: KeyOrder, options: &PmemOptions, is_new: bool) -> Result<Arc<dyn PmemEngine>> {
        let StoredPool { location, files: form, seqnos_at_open: at_open, check_level, .. } = self;
        let (pool, snapshots, path, env) =
            (options.pool_options(), Arc::clone(&location.snapshots), location.path(), Arc::clone(&location.env));
        match form {
            StoredPoolFiles::Image(store, Some(image)) => {
                let opened = pool_recovery::open_with(image, order, &pool, snapshots, check_level, Some(&*env));
                let tree = opened
                    .and_then(|opened| check_recovered_tree(opened, at_open))
                    .map_err(|error| error.in_file(&path))?;
                Ok(Arc::new(PoolEngine::new(tree, PoolCheckpointer::new(*store, location, at_open), options)))
            }
            StoredPoolFiles::Image(store, None) => {
                let mut file_id = [0; 16];
                location.env.random(&mut file_id);
                let least = if is_new { pool.len_max } else { pool.grow_by.max(2 * PAGE).min(pool.len_max) };
                let image = PoolImage::for_existing(least, options.reserved_address_len(location.wal_bytes))?;
                let tree = pool_recovery::create(image, file_id, order, &pool, snapshots)?;
                Ok(Arc::new(PoolEngine::new(tree, PoolCheckpointer::new(*store, location, at_open), options)))
            }
            StoredPoolFiles::Mapped(backend) => {
                let opened = pool_recovery::open_with(backend, order, &pool, snapshots, check_level, Some(&*env));
                let tree = opened
                    .and_then(|opened| check_recovered_tree(opened, at_open))
                    .map_err(|error| error.in_file(&path))?;
                tree.clear_clean_shutdown_mark();
                let durability = MappedPoolDurability::new(location, path, at_open);
                Ok(Arc::new(PoolEngine::new(tree, durability, options)))
            }
        }
    }
}

/// The tree, unless there is a number in it that none can be: whatever is put under its key would be taken for older,
/// and be lost.
fn check_recovered_tree<M: PersistenceBackend>(
    (tree, report): (PoolTree<M>, PoolRecoveryReport),
    (_, highest): (SeqNo, SeqNo),
) -> Result<PoolTree<M>> {
    check_max_seqno(&report, highest).map(|()| tree)
}

fn check_max_seqno(report: &PoolRecoveryReport, highest: SeqNo) -> Result<()> {
    match report.max_seqno <= highest {
        true => Ok(()),
        false => {
            Err(Error::corruption(format!("a record has the number {}, the last is {}", report.max_seqno.0, highest.0)))
        }
    }
}

fn region_file_id(region: &Region) -> Result<[u8; 16]> {
    let mut header = [0; FileHeader::LEN];
    if !region.contains(0, PAGE) {
        return Err(Error::corruption("the pool ends in its header"));
    }
    region.read(0, &mut header);
    Ok(FileHeader::decode(FileKind::Pool, &header)?.file_id)
}

/// What a pool that is memory says about its numbers, all through the first is in it, and none behind the second; and
/// whether it was closed.
fn read_seqno_fields(region: &Region) -> Result<((SeqNo, SeqNo), PoolCheckLevel)> {
    let file_id = region_file_id(region)?;
    let end = read_seqno_field(region, &file_id, PoolSeqnoField::SeqnoEnd)?;
    let check_level =
        if has_clean_shutdown_mark(region, &file_id) { PoolCheckLevel::StructureOnly } else { PoolCheckLevel::Full };
    Ok((
        (read_seqno_field(region, &file_id, PoolSeqnoField::AppliedThrough)?, SeqNo(end.0.saturating_sub(1))),
        check_level,
    ))
}
