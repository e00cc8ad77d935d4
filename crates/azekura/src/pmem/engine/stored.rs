//! Opening a pool: what its files are, and what keeps it from then on.
//!
//! A pool is made a file that is used as memory where the directory's file system is memory, else an image. The
//! manifest says which; a database that was copied to another file system has its pools as images from then on, and
//! the first checkpoint writes the image in the place of the file.

use std::path::Path;
use std::sync::Arc;

use crate::base::file_header::{FileHeader, FileKind};
use crate::base::{Error, KeyOrder, Result, SeqNo};
use crate::mem::region::{PAGE, Region};
use crate::pmem::engine::checkpoints::Checkpoints;
use crate::pmem::engine::contract::PmemTree;
use crate::pmem::engine::home::{PoolHome, copy_region, is_memory};
use crate::pmem::engine::memory::Memory;
use crate::pmem::engine::pool::Pool;
use crate::pmem::medium::{Image, Medium, Shared};
use crate::pmem::notes::{Note, is_closed, noted};
use crate::pmem::options::PmemOptions;
use crate::pmem::recover::{self, Report, Trust};
use crate::pmem::store::{ImageStore, PoolFile};
use crate::pmem::tree::Tree;
use crate::vfs::OpenMode;
use crate::vfs::fs::PersistenceLevel;

/// What the manifest says about the files of a pool.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct KnownPool {
    pub(crate) made_as_memory: bool,
    /// A checkpoint brought everything through this number to the files; there are none if that is nothing, unless it
    /// was made as memory.
    pub(crate) flushed: SeqNo,
    /// The file id of the pool; older manifests do not have it.
    pub(crate) file_id: Option<[u8; 16]>,
}

impl KnownPool {
    /// Checks that these are the bytes of the pool that the manifest means, of which an image says that all through
    /// `replay_from` is in it.
    ///
    /// # Errors
    /// `Corruption` if they are another pool's, or older than the last checkpoint.
    fn check(&self, region: &Region, replay_from: Option<SeqNo>) -> Result<()> {
        if self.file_id.is_some_and(|known| file_id_of(region).ok() != Some(known)) {
            return Err(Error::corruption("the file belongs to another pool than the manifest says"));
        }
        if replay_from.unwrap_or_default() < self.flushed {
            let through = self.flushed.0;
            return Err(Error::corruption(format!(
                "the file is older than the manifest, which says that everything through number {through} is in it"
            )));
        }
        Ok(())
    }
}

/// A pool as its files have it, before the order of its keys is known.
pub(crate) struct StoredPool {
    home: PoolHome,
    form: Form,
    /// All through the first is in it; perhaps more, through the second.
    at_open: (SeqNo, SeqNo),
    /// What is known of its bytes.
    trust: Trust,
    /// None where there is nothing yet.
    file_id: Option<[u8; 16]>,
}

enum Form {
    /// An image in a file of its own, none if there is nothing yet.
    Image(Box<ImageStore>, Option<Image>),
    Memory(Shared),
}

impl StoredPool {
    /// Reads the files of a pool.
    ///
    /// # Errors
    /// `Corruption` if they are not what was written, or not what the manifest means; `OutOfSpace` if there is not so
    /// much memory.
    pub(crate) fn read(home: PoolHome, known: &KnownPool, options: &PmemOptions) -> Result<StoredPool> {
        let KnownPool { made_as_memory, flushed, .. } = *known;
        let (fs, dir, partition) = (&home.fs, &home.dir, home.partition);
        let path = home.path();
        let is_raw = made_as_memory && !ImageStore::is_there(&**fs, dir, partition)?;
        if is_raw && !home.read_only && is_memory(&**fs, dir) {
            let open = || {
                let medium = Shared::for_stored(fs.open(&path, OpenMode::Write)?, options.addresses(0))?;
                let notes = notes_of(medium.region())?;
                known.check(medium.region(), None)?;
                let file_id = file_id_of(medium.region())?;
                Ok((medium, notes, file_id))
            };
            let (medium, (at_open, trust), file_id) = open().map_err(|error: Error| error.in_file(&path))?;
            // A file of its own kind may lie in that directory.
            if medium.level() == fs.memory_level(dir) {
                return Ok(StoredPool { home, form: Form::Memory(medium), at_open, trust, file_id: Some(file_id) });
            }
        }
        // One that was memory is read as it is, and kept as it is until an image of it is permanent.
        let never_written = !made_as_memory && flushed == SeqNo::ZERO;
        let env = Some(&*home.env);
        let addresses = options.addresses(home.log_bytes);
        let (store, loaded) = ImageStore::open(fs, dir, partition, addresses, never_written, home.read_only, env)?;
        let mut file_id = None;
        if let Some(loaded) = &loaded {
            let region = loaded.image.region();
            let checked = known.check(region, (!loaded.is_raw).then_some(loaded.replay_from));
            file_id = Some(checked.and_then(|()| file_id_of(region)).map_err(|error| error.in_file(&path))?);
        }
        let (at_open, trust) = match &loaded {
            Some(loaded) if loaded.is_raw => {
                let (at_open, trust) = notes_of(loaded.image.region()).map_err(|error| error.in_file(&path))?;
                // Where it is memory, and is only looked at. On its way to what is none anything may have become of it.
                let is_at_home = is_raw && home.read_only && is_memory(&**fs, dir);
                (at_open, if is_at_home { trust } else { Trust::Nothing })
            }
            // Each page has a checksum of its own, and all of them have one.
            Some(loaded) => ((loaded.replay_from, loaded.highest), Trust::Bytes),
            None => (Default::default(), Trust::Nothing),
        };
        let form = Form::Image(Box::new(store), loaded.map(|loaded| loaded.image));
        Ok(StoredPool { home, form, at_open, trust, file_id })
    }

    /// Reads all of it and believes nothing; how many records there are. What only makes sense in the order of its keys
    /// is left out where that is not `bytewise`.
    ///
    /// # Errors
    /// `Corruption` if it is not what was written.
    pub(crate) fn verify(self, bytewise: bool, options: &PmemOptions) -> Result<u64> {
        match &self.form {
            Form::Image(_, None) => Ok(0),
            _ if bytewise => {
                let doubted = StoredPool { trust: Trust::Nothing, ..self };
                Ok(doubted.open(KeyOrder::bytewise(), options, false)?.approximate_len())
            }
            Form::Image(_, Some(image)) => self.check_records(image.region()),
            Form::Memory(medium) => self.check_records(medium.region()),
        }
    }

    fn check_records(&self, region: &Region) -> Result<u64> {
        let report = recover::check_records(region)?;
        no_higher(&report, self.at_open.1).map(|()| report.records)
    }

    /// The file id of the pool; none where there is nothing yet.
    pub(crate) fn file_id(&self) -> Option<[u8; 16]> {
        self.file_id
    }

    /// All through the first number is in it; perhaps more, through the second.
    pub(crate) fn at_open(&self) -> (SeqNo, SeqNo) {
        self.at_open
    }

    /// Whether its file is used as memory.
    pub(crate) fn is_memory(&self) -> bool {
        matches!(&self.form, Form::Memory(_))
    }

    /// Whether what is stored into it survives power loss by itself.
    pub(crate) fn survives_power_loss(&self) -> bool {
        matches!(&self.form, Form::Memory(medium) if medium.level() == PersistenceLevel::Power)
    }

    /// Copies the files, in which nothing changes.
    pub(crate) fn copy_to(&self, dir: &Path) -> Result<()> {
        match &self.form {
            Form::Image(store, _) => store.copy_to(dir),
            Form::Memory(medium) => copy_region(&*self.home.fs, medium.region(), &dir.join(self.file_name())),
        }
    }

    /// Removes the files, of a partition that was deleted.
    pub(crate) fn remove_files(self) {
        match self.form {
            Form::Image(store, _) => store.remove(),
            Form::Memory(_) => drop(self.home.fs.remove_file(&self.home.path())),
        }
    }

    fn file_name(&self) -> String {
        PoolFile::Pool.name(self.home.partition)
    }

    /// The tree. One that `is_new` needs all the addresses that it may grow to.
    ///
    /// # Errors
    /// `Corruption` if it is no pool with keys in that order, `OutOfSpace` if there is no memory.
    pub(crate) fn open(self, order: KeyOrder, options: &PmemOptions, is_new: bool) -> Result<Arc<dyn PmemTree>> {
        let StoredPool { home, form, at_open, trust, .. } = self;
        let (pool, points, path, env) = (options.pool(), Arc::clone(&home.points), home.path(), Arc::clone(&home.env));
        match form {
            Form::Image(store, Some(image)) => {
                let opened = recover::open_with(image, order, &pool, points, trust, Some(&*env));
                let tree = opened.and_then(|opened| known(opened, at_open)).map_err(|error| error.in_file(&path))?;
                Ok(Arc::new(Pool::new(tree, Checkpoints::new(*store, home, at_open), options)))
            }
            Form::Image(store, None) => {
                let mut file_id = [0; 16];
                home.env.random(&mut file_id);
                let least = if is_new { pool.len_max } else { pool.grow_by.max(2 * PAGE).min(pool.len_max) };
                let image = Image::for_stored(least, options.addresses(home.log_bytes))?;
                let tree = recover::create(image, file_id, order, &pool, points)?;
                Ok(Arc::new(Pool::new(tree, Checkpoints::new(*store, home, at_open), options)))
            }
            Form::Memory(medium) => {
                let opened = recover::open_with(medium, order, &pool, points, trust, Some(&*env));
                let tree = opened.and_then(|opened| known(opened, at_open)).map_err(|error| error.in_file(&path))?;
                tree.note_open();
                let keeper = Memory::new(home, path, at_open);
                Ok(Arc::new(Pool::new(tree, keeper, options)))
            }
        }
    }
}

/// The tree, unless there is a number in it that none can be: whatever is put under its key would be taken for older,
/// and be lost.
fn known<M: Medium>((tree, report): (Tree<M>, Report), (_, highest): (SeqNo, SeqNo)) -> Result<Tree<M>> {
    no_higher(&report, highest).map(|()| tree)
}

fn no_higher(report: &Report, highest: SeqNo) -> Result<()> {
    match report.highest <= highest {
        true => Ok(()),
        false => {
            Err(Error::corruption(format!("a record has the number {}, the last is {}", report.highest.0, highest.0)))
        }
    }
}

fn file_id_of(region: &Region) -> Result<[u8; 16]> {
    let mut header = [0; FileHeader::LEN];
    if !region.contains(0, PAGE) {
        return Err(Error::corruption("the pool ends in its header"));
    }
    region.read(0, &mut header);
    Ok(FileHeader::decode(FileKind::Pool, &header)?.file_id)
}

/// What a pool that is memory says about its numbers, all through the first is in it, and none behind the second; and
/// whether it was closed.
fn notes_of(region: &Region) -> Result<((SeqNo, SeqNo), Trust)> {
    let file_id = file_id_of(region)?;
    let end = noted(region, &file_id, Note::NumbersEnd)?;
    let trust = if is_closed(region, &file_id) { Trust::Bytes } else { Trust::Nothing };
    Ok(((noted(region, &file_id, Note::Applied)?, SeqNo(end.0.saturating_sub(1))), trust))
}
