//! Opens a pool: finds its files and chooses how it is made durable.
//!
//! A new pool is a mapped file if the file system of the directory is memory, else an image. The manifest says which.
//! If a database was copied to another file system, its mapped pools become images, and the first checkpoint replaces
//! the file by an image.

use std::path::Path;
use std::sync::Arc;

use crate::base::{Error, KeyOrder, Result, SeqNo};
use crate::mem::pages::PAGE;
use crate::mem::region::Region;
use crate::pmem::options::PmemOptions;
use crate::pmem::persistence::{MappedPoolFile, PersistenceBackend, PoolImage};
use crate::pmem::pool::checkpoint::{MappedPoolDurability, PoolCheckpointer, copy_region};
use crate::pmem::pool::engine::{PmemEngine, PoolEngine, PoolLocation, uses_mapped_pools};
use crate::pmem::pool::{ImageStore, PoolCheckLevel, PoolFileKind, PoolRecoveryReport, pool_recovery};
use crate::pmem::pool_header::{PoolSeqnoField, has_clean_shutdown_mark, read_seqno_field};
use crate::pmem::tree::PoolTree;
use crate::vfs::OpenMode;
use crate::vfs::fs::PersistenceLevel;

/// What the manifest says about the files of a pool.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ManifestPoolInfo {
    pub(crate) created_mapped: bool,
    /// The last checkpoint wrote every record up to this sequence number to the files. If 0, there are no files,
    /// unless the pool was created as a mapped file.
    pub(crate) flushed_through: SeqNo,
    /// The file id of the pool; `None` in manifests of older versions.
    pub(crate) file_id: Option<[u8; 16]>,
}

impl ManifestPoolInfo {
    /// Checks that `region` is the pool that the manifest refers to. `replay_from` is the sequence number up to which
    /// its image is complete; `None` for a mapped pool.
    ///
    /// # Errors
    /// `Corruption` if it is another pool, or older than the last checkpoint.
    fn check(&self, region: &Region, replay_from: Option<SeqNo>) -> Result<()> {
        if self.file_id.is_some_and(|known| pool_recovery::read_file_id(region).ok() != Some(known)) {
            return Err(Error::corruption("the file belongs to a different pool than the one in the manifest"));
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

/// A pool as it is in its files, before its key order is known.
pub(crate) struct StoredPool {
    location: PoolLocation,
    files: StoredPoolFiles,
    /// The files contain every record up to the first number, and perhaps records up to the second.
    seqnos_at_open: (SeqNo, SeqNo),
    /// How much of the pool must be checked.
    check_level: PoolCheckLevel,
    /// `None` if no checkpoint was written yet.
    file_id: Option<[u8; 16]>,
}

enum StoredPoolFiles {
    /// An image in its own file format; `None` if no checkpoint was written yet.
    Image(Box<ImageStore>, Option<PoolImage>),
    Mapped(MappedPoolFile),
}

impl StoredPool {
    /// Reads the files of a pool.
    ///
    /// # Errors
    /// `Corruption` if the files are damaged or are not those that the manifest refers to; `OutOfSpace` if there is
    /// not enough memory.
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
                let file_id = pool_recovery::read_file_id(backend.region())?;
                Ok((backend, notes, file_id))
            };
            let (backend, (at_open, check_level), file_id) = open().map_err(|error: Error| error.in_file(&path))?;
            // The directory may contain a file with another persistence level than the directory itself.
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
        // The file of a mapped pool is read as an image, and stays unchanged until an image of it is permanent.
        let never_written = !made_as_memory && flushed == SeqNo::ZERO;
        let env = Some(&*location.env);
        let addresses = options.reserved_address_len(location.wal_bytes);
        let (store, loaded) = ImageStore::open(fs, dir, partition, addresses, never_written, location.read_only, env)?;
        let mut file_id = None;
        if let Some(loaded) = &loaded {
            let region = loaded.image.region();
            let checked = known.check(region, (!loaded.is_raw).then_some(loaded.replay_from));
            file_id =
                Some(checked.and_then(|()| pool_recovery::read_file_id(region)).map_err(|error| error.in_file(&path))?);
        }
        let (at_open, check_level) = match &loaded {
            Some(loaded) if loaded.is_raw => {
                let (at_open, check_level) =
                    read_seqno_fields(loaded.image.region()).map_err(|error| error.in_file(&path))?;
                // The clean shutdown mark is trusted only where the pool is mapped and opened read-only. If it was
                // copied to another kind of file system, any part of it may have changed.
                let is_at_home = is_raw && location.read_only && uses_mapped_pools(&**fs, dir);
                (at_open, if is_at_home { check_level } else { PoolCheckLevel::Full })
            }
            // Every page of an image has a checksum, and all checksums were verified.
            Some(loaded) => ((loaded.replay_from, loaded.max_seqno), PoolCheckLevel::StructureOnly),
            None => (Default::default(), PoolCheckLevel::Full),
        };
        let form = StoredPoolFiles::Image(Box::new(store), loaded.map(|loaded| loaded.image));
        Ok(StoredPool { location, files: form, seqnos_at_open: at_open, check_level, file_id })
    }

    /// Reads and checks everything without trusting any byte. Returns the number of records. Checks that need the key
    /// order are skipped unless the order is `bytewise`.
    ///
    /// # Errors
    /// `Corruption` if the pool is damaged.
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

    /// The file id of the pool; `None` if no checkpoint was written yet.
    pub(crate) fn file_id(&self) -> Option<[u8; 16]> {
        self.file_id
    }

    /// The files contain every record up to the first number, and perhaps records up to the second.
    pub(crate) fn seqnos_at_open(&self) -> (SeqNo, SeqNo) {
        self.seqnos_at_open
    }

    /// Bytes of memory of an image.
    pub(crate) fn image_bytes(&self) -> u64 {
        match &self.files {
            StoredPoolFiles::Image(_, Some(image)) => image.region().len(),
            _ => 0,
        }
    }

    /// Whether the pool is a mapped file.
    pub(crate) fn is_mapped(&self) -> bool {
        matches!(&self.files, StoredPoolFiles::Mapped(_))
    }

    /// Whether stores into the pool survive power loss without the WAL.
    pub(crate) fn survives_power_loss(&self) -> bool {
        matches!(&self.files, StoredPoolFiles::Mapped(backend) if backend.level() == PersistenceLevel::PowerLoss)
    }

    /// Copies the files. The caller makes sure that they do not change.
    pub(crate) fn copy_to(&self, dir: &Path) -> Result<()> {
        match &self.files {
            StoredPoolFiles::Image(store, _) => store.copy_to(dir),
            StoredPoolFiles::Mapped(backend) => {
                copy_region(&*self.location.fs, backend.region(), &dir.join(self.file_name()))
            }
        }
    }

    /// Removes the files of a deleted partition.
    pub(crate) fn remove_files(self) {
        match self.files {
            StoredPoolFiles::Image(store, _) => store.remove(),
            StoredPoolFiles::Mapped(_) => drop(self.location.fs.remove_file(&self.location.path())),
        }
    }

    fn file_name(&self) -> String {
        PoolFileKind::Pool.name(self.location.partition)
    }

    /// Opens the tree. If `is_new`, address space for its maximum size is required.
    ///
    /// # Errors
    /// `Corruption` if it is not a valid pool with keys in that order, `OutOfSpace` if there is no memory.
    pub(crate) fn open(self, order: KeyOrder, options: &PmemOptions, is_new: bool) -> Result<Arc<dyn PmemEngine>> {
        let StoredPool { location, files: form, seqnos_at_open: at_open, check_level, .. } = self;
        let (pool, readers, path, env) =
            (options.pool_options(), location.readers(), location.path(), Arc::clone(&location.env));
        match form {
            StoredPoolFiles::Image(store, Some(image)) => {
                let opened = pool_recovery::open_with(image, order, &pool, readers, check_level, Some(&*env));
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
                let tree = pool_recovery::create(image, file_id, order, &pool, readers)?;
                Ok(Arc::new(PoolEngine::new(tree, PoolCheckpointer::new(*store, location, at_open), options)))
            }
            StoredPoolFiles::Mapped(backend) => {
                let opened = pool_recovery::open_with(backend, order, &pool, readers, check_level, Some(&*env));
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

/// Checks the sequence numbers of a recovered tree. A record with a number above the highest possible one is refused,
/// because later changes of its key would be taken for older ones and be lost.
fn check_recovered_tree<M: PersistenceBackend>(
    (tree, report): (PoolTree<M>, PoolRecoveryReport),
    (_, highest): (SeqNo, SeqNo),
) -> Result<PoolTree<M>> {
    check_max_seqno(&report, highest).map(|()| tree)
}

fn check_max_seqno(report: &PoolRecoveryReport, highest: SeqNo) -> Result<()> {
    match report.max_seqno <= highest {
        true => Ok(()),
        false => Err(Error::corruption(format!(
            "a record has sequence number {}, above the last one, {}",
            report.max_seqno.0, highest.0
        ))),
    }
}

/// Reads the header of a mapped pool: it contains every record of the WAL up to the first number and none above the
/// second. The check level depends on whether it was closed cleanly.
fn read_seqno_fields(region: &Region) -> Result<((SeqNo, SeqNo), PoolCheckLevel)> {
    let file_id = pool_recovery::read_file_id(region)?;
    let end = read_seqno_field(region, &file_id, PoolSeqnoField::SeqnoEnd)?;
    let check_level =
        if has_clean_shutdown_mark(region, &file_id) { PoolCheckLevel::StructureOnly } else { PoolCheckLevel::Full };
    Ok((
        (read_seqno_field(region, &file_id, PoolSeqnoField::AppliedThrough)?, SeqNo(end.0.saturating_sub(1))),
        check_level,
    ))
}
