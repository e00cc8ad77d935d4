//! The files of a pool whose image lives in memory, and bringing checkpoints to them.
//!
//! Thread safe. Checkpoints and copies wait for each other, also while files are synced; nobody who reads or writes the
//! tree waits for them, but for a writer who finds that too many pages were put aside (see [`pages`]).
//!
//! [`pages`]: crate::pmem::store::pages

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::base::edit::PartitionId;
use crate::base::file_header::{FileHeader, FileKind};
use crate::base::sync::lock;
use crate::base::{Error, ErrorKind, Result, SeqNo};
use crate::mem::region::PAGE;
use crate::pmem::medium::{Image, Medium};
use crate::pmem::store::format::{Before, GROUP, Head, PAGE_LEN, Sums, check_place, file_len, place};
use crate::pmem::store::load::{load_image, load_raw};
use crate::pmem::store::pages::Cut;
use crate::pmem::store::shadow::{Shadow, ShadowWriter, shadow_len};
use crate::vfs::{Env, File, Fs, OpenMode};

/// A shadow that is longer than this is cut when nobody needs it any more, in bytes.
const SHADOW_KEPT: u64 = 8 << 20;

/// Bytes that are copied at once.
const PIECE: usize = 1 << 20;

/// What a file of a pool is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum PoolFile {
    /// The pool itself, used as memory or as the place of an image.
    Pool,
    /// Where the pages of a checkpoint are written first.
    Shadow,
}

impl PoolFile {
    /// The name of the file of a partition.
    pub(crate) fn name(self, partition: PartitionId) -> String {
        let suffix = match self {
            PoolFile::Pool => "pool",
            PoolFile::Shadow => "shadow",
        };
        format!("p{:06}.{suffix}", partition.0)
    }
}

/// What the file called `name` is, and of which partition, if it is one of these.
pub(crate) fn parse_name(name: &str) -> Option<(PartitionId, PoolFile)> {
    let partition = PartitionId(name.strip_prefix('p')?.split_once('.')?.0.parse().ok()?);
    let file = [PoolFile::Pool, PoolFile::Shadow].into_iter().find(|file| file.name(partition) == name)?;
    Some((partition, file))
}

/// What files held.
pub(crate) struct Loaded {
    pub(crate) image: Image,
    /// All that was visible through this number is in the image.
    pub(crate) replay_from: SeqNo,
    /// The highest number that may be in it. Both are 0 of a pool that was used as memory: it says itself what is
    /// known.
    pub(crate) highest: SeqNo,
    /// It was used as memory.
    pub(crate) is_raw: bool,
}

impl Loaded {
    fn raw(image: Image) -> Loaded {
        Loaded { image, replay_from: SeqNo::ZERO, highest: SeqNo::ZERO, is_raw: true }
    }
}

/// What a checkpoint has cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Written {
    /// Of the image.
    pub(crate) pages: u64,
    /// To all files, twice what is in them.
    pub(crate) bytes: u64,
}

/// The files of one pool: where its image goes at checkpoints.
pub(crate) struct ImageStore {
    fs: Arc<dyn Fs>,
    dir: PathBuf,
    partition: PartitionId,
    path: PathBuf,
    read_only: bool,
    files: Mutex<Files>,
    /// That the files take: of the pool, and of the shadow.
    bytes: [AtomicU64; 2],
}

#[derive(Default)]
struct Files {
    pool: Option<Arc<dyn File>>,
    shadow: Option<Arc<dyn File>>,
    /// Whether the names survive power loss.
    named: bool,
    /// The last checkpoint that is permanent.
    last: Option<Head>,
    /// There was none, and the file is a pool that was used as memory.
    raw: bool,
    sums: Sums,
    /// A shadow that is permanent, and whose pages are perhaps not where they belong: until they are, the file of the
    /// pool is worth nothing without it.
    owed: Option<Shadow>,
}

impl ImageStore {
    /// Opens the files of a partition's pool, and reads the image: also a pool that was used as memory, of which the
    /// next checkpoint makes an image; until that is permanent the file stays as it is. With `never_written` there was
    /// no checkpoint yet, and whatever is there goes with the first one: opening changes nothing. A large one is read
    /// with threads of `env`.
    ///
    /// # Errors
    /// `Corruption` if there is not what was written, `Unsupported` if a newer version wrote it, `OutOfSpace` if there
    /// is no memory, and those of the files.
    pub(crate) fn open(
        fs: &Arc<dyn Fs>,
        dir: &Path,
        partition: PartitionId,
        len_max: u64,
        never_written: bool,
        read_only: bool,
        env: Option<&dyn Env>,
    ) -> Result<(ImageStore, Option<Loaded>)> {
        let store = ImageStore {
            fs: Arc::clone(fs),
            dir: dir.to_path_buf(),
            partition,
            path: dir.join(PoolFile::Pool.name(partition)),
            read_only,
            files: Mutex::default(),
            bytes: Default::default(),
        };
        if never_written {
            return Ok((store, None));
        }
        let loaded = store.load(&mut lock(&store.files), len_max, env)?;
        Ok((store, Some(loaded)))
    }

    /// Whether there is an image or a shadow that is whole. Another file of that name may be a pool that is used as
    /// memory.
    ///
    /// # Errors
    /// Those of the files.
    pub(crate) fn is_there(fs: &dyn Fs, dir: &Path, partition: PartitionId) -> Result<bool> {
        let shadow = dir.join(PoolFile::Shadow.name(partition));
        if fs.exists(&shadow)? && Shadow::read(&*fs.open(&shadow, OpenMode::Read)?)?.is_some() {
            return Ok(true);
        }
        let path = dir.join(PoolFile::Pool.name(partition));
        if !fs.exists(&path)? {
            return Ok(false);
        }
        let mut header = [0; FileHeader::LEN];
        let got = fs.open(&path, OpenMode::Read)?.read_at(&mut header, 0)?;
        Ok(got == header.len() && FileHeader::decode(FileKind::PoolImage, &header).is_ok())
    }

    /// Of the pool's file, for messages.
    #[cfg(test)]
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the files, as far as that can be done: no checkpoint comes any more.
    pub(crate) fn remove(&self) {
        let mut files = lock(&self.files);
        drop((files.pool.take(), files.shadow.take()));
        for path in [self.path.clone(), self.shadow_path()] {
            let _found_by_the_next_open = self.fs.remove_file(&path);
        }
    }

    fn shadow_path(&self) -> PathBuf {
        self.dir.join(PoolFile::Shadow.name(self.partition))
    }

    /// That the files take.
    pub(crate) fn disk_bytes(&self) -> u64 {
        self.bytes.iter().map(|bytes| bytes.load(Ordering::Relaxed)).sum()
    }

    /// Space that a checkpoint takes beyond what the files have, for an image of `len` bytes of which `changed` pages
    /// were changed: the shadow, and what the file of the pool grows by.
    pub(crate) fn space_needed(&self, len: u64, changed: u64) -> u64 {
        if changed == 0 {
            return 0;
        }
        let [pool, shadow] = [&self.bytes[0], &self.bytes[1]].map(|bytes| bytes.load(Ordering::Relaxed));
        let pages = len / PAGE;
        let checks = changed.min(pages.div_ceil(GROUP));
        let grows = file_len(len).unwrap_or(u64::MAX).saturating_sub(pool);
        grows.saturating_add(shadow_len(changed.min(pages) + checks + 1).saturating_sub(shadow))
    }

    fn measure(&self, files: &Files) -> Result<()> {
        let len = |file: &Option<Arc<dyn File>>| file.as_ref().map_or(Ok(0), |file| file.length());
        self.bytes[0].store(len(&files.pool)?, Ordering::Relaxed);
        self.bytes[1].store(len(&files.shadow)?, Ordering::Relaxed);
        Ok(())
    }

    fn load(&self, files: &mut Files, len_max: u64, env: Option<&dyn Env>) -> Result<Loaded> {
        let mode = if self.read_only { OpenMode::Read } else { OpenMode::Write };
        if !self.fs.exists(&self.path)? {
            return Err(Error::corruption("the file of a pool is missing").in_file(&self.path));
        }
        let pool = self.fs.open(&self.path, mode)?;
        let mut page = vec![0; PAGE_LEN];
        let got = pool.read_at(&mut page, 0)?;
        page.truncate(got);
        let head = Head::decode(&page);
        let shadow_path = self.shadow_path();
        if self.fs.exists(&shadow_path)? {
            let shadow = self.fs.open(&shadow_path, mode)?;
            // Older than the pool it may be where a sync had lied; then it is of no use.
            let of_use = |found: &Shadow| match &head {
                Ok(head) => head.file_id == found.file_id && head.number <= found.number,
                // Torn, and the shadow mends it; or a pool that this is the first image of.
                Err(_) => FileHeader::decode(FileKind::Pool, &page).map_or(true, |pool| pool.file_id == found.file_id),
            };
            files.owed = Shadow::read(&*shadow)?.filter(of_use);
            files.shadow = Some(shadow);
        }
        files.pool = Some(Arc::clone(&pool));
        files.named = !self.read_only;
        files.raw = files.owed.is_none() && FileHeader::decode(FileKind::Pool, &page).is_ok();
        // Opening changes no file: the pages of the shadow are put where they belong before the next checkpoint.
        let newer = files.owed.as_ref().zip(files.shadow.as_deref());
        let loaded = match files.raw {
            true => load_raw(&*pool, len_max).map(Loaded::raw),
            false => load_image(&pool, page, newer, self.partition, len_max, env).map(|(image, sums, head)| {
                let (replay_from, highest) = (head.replay_from, head.highest);
                (files.sums, files.last) = (sums, Some(head));
                Loaded { image, replay_from, highest, is_raw: false }
            }),
        };
        let loaded = loaded.map_err(|error| error.in_file(&self.path))?;
        self.measure(files)?;
        Ok(loaded)
    }

    /// Brings what has changed since the last time to the files. `cut` is called once, before any page is copied, and
    /// says what is visible then. `make_durable` is called with that once the pages are copied, before anything of them
    /// counts: it returns once the log is durable through everything that may be in them, and the highest number of it.
    ///
    /// # Errors
    /// Those of the callbacks and of the files, `Invalid` if this was opened only to be read. Then the files hold the
    /// last checkpoint, or already this one, and all that was to be written is to be written again.
    pub(crate) fn checkpoint(
        &self,
        image: &Image,
        cut: &mut dyn FnMut() -> SeqNo,
        make_durable: &mut dyn FnMut(SeqNo) -> Result<SeqNo>,
    ) -> Result<Written> {
        if self.read_only {
            return Err(Error::invalid("the database was opened only to be read"));
        }
        let files = &mut *lock(&self.files);
        // A shadow that is still needed is not written over.
        self.settle(files)?;
        let (pool, shadow) = self.files_to_write(files)?;
        let replay_from = cut();
        let mut taken = image.cut()?;
        let file_id = id_of(image)?;
        let mut writer = ShadowWriter::new(&*shadow, file_id);
        let changed = copy_pages(&mut taken, &mut writer)?;
        let highest = make_durable(replay_from)?;
        let (number, len) = (files.last.as_ref().map_or(1, |last| last.number + 1), taken.len());
        let mut head = Head { file_id, partition: self.partition, number, replay_from, highest, len, root: 0 };
        files.sums.grow(len / PAGE)?;
        let before = files.sums.set(&changed);
        let finished = finish(&mut files.sums, &before, &mut head, writer, &*pool);
        let permanent = finished.and_then(|finished| {
            shadow.sync_data()?;
            if !files.named {
                self.fs.sync_dir(&self.dir)?;
            }
            Ok(finished)
        });
        let owed = match permanent {
            Ok(owed) => owed,
            Err(error) => {
                files.sums.put_back(&before);
                return Err(error);
            }
        };
        let written = Written { pages: changed.len() as u64, bytes: 2 * owed.pages() * PAGE };
        (files.named, files.last, files.owed) = (true, Some(head), Some(owed));
        self.settle(files)?;
        taken.keep();
        self.measure(files)?;
        Ok(written)
    }

    /// The file of the pool and that of the shadow, made if need be.
    fn files_to_write(&self, files: &mut Files) -> Result<(Arc<dyn File>, Arc<dyn File>)> {
        let open = |path: &Path| match self.fs.exists(path)? {
            true => self.fs.open(path, OpenMode::Write),
            false => self.fs.open(path, OpenMode::Create),
        };
        let pool = match &files.pool {
            Some(pool) => Arc::clone(pool),
            None => Arc::clone(files.pool.insert(open(&self.path)?)),
        };
        let shadow = match &files.shadow {
            Some(shadow) => Arc::clone(shadow),
            None => {
                files.named = false;
                // Before the first checkpoint it means nothing, whoever left it there.
                if files.last.is_none() && self.fs.exists(&self.shadow_path())? {
                    self.fs.remove_file(&self.shadow_path())?;
                }
                Arc::clone(files.shadow.insert(open(&self.shadow_path())?))
            }
        };
        Ok((pool, shadow))
    }

    /// Brings the pages of a shadow that is needed to where they belong; then it is needed no more.
    fn settle(&self, files: &mut Files) -> Result<()> {
        let (Some(owed), Some(pool), Some(shadow)) = (&files.owed, &files.pool, &files.shadow) else { return Ok(()) };
        owed.apply(&**shadow, &**pool)?;
        pool.sync_data()?;
        files.owed = None;
        // Whether this succeeds, and survives, does not matter: to apply it again changes nothing.
        let _ = match shadow.length() {
            Ok(len) if len > SHADOW_KEPT => shadow.set_length(0),
            _ => shadow.write_at(&[0; FileHeader::LEN], 0),
        };
        Ok(())
    }

    /// Copies the files, as they were after the last checkpoint, to another directory. They are synced there; their
    /// names are the caller's business. Nothing if there was no checkpoint.
    ///
    /// # Errors
    /// Those of the files.
    pub(crate) fn copy_to(&self, dir: &Path) -> Result<()> {
        let files = lock(&self.files);
        if files.last.is_none() && !files.raw {
            return Ok(());
        }
        for (file, kind) in [(&files.pool, PoolFile::Pool), (&files.shadow, PoolFile::Shadow)] {
            let needed = kind == PoolFile::Pool || files.owed.is_some();
            if let Some(file) = file.as_ref().filter(|_| needed) {
                self.copy(&**file, &dir.join(kind.name(self.partition)))?;
            }
        }
        Ok(())
    }

    fn copy(&self, file: &dyn File, path: &Path) -> Result<()> {
        let target = self.fs.open(path, OpenMode::Create)?;
        let (len, mut piece) = (file.length()?, vec![0; PIECE]);
        target.set_length(len)?;
        let mut at = 0;
        while at < len {
            let got = file.read_at(&mut piece, at)?;
            // What was never written stays a hole.
            if piece[..got].iter().any(|byte| *byte != 0) {
                target.write_at(&piece[..got], at)?;
            }
            at += got.max(1) as u64;
        }
        target.sync_data()
    }
}

/// What binds the files to a pool: the id in its own header, which never changes.
fn id_of(image: &Image) -> Result<[u8; 16]> {
    let mut header = [0; FileHeader::LEN];
    if !image.region().contains(0, PAGE) {
        return Err(Error::invalid("a pool without a page has no checkpoint"));
    }
    image.region().read(0, &mut header);
    Ok(FileHeader::decode(FileKind::Pool, &header)?.file_id)
}

/// Writes the pages of a cut to a shadow; their checksums.
fn copy_pages(taken: &mut Cut<'_>, writer: &mut ShadowWriter<'_>) -> Result<Vec<(u64, u64)>> {
    let (mut page, mut changed) = (vec![0; PAGE_LEN], Vec::new());
    while let Some(number) = taken.next(&mut page) {
        changed.push((number, writer.push(place(number), &page)?));
    }
    Ok(changed)
}

/// Adds the check pages and the first page to a shadow, and makes it one; it is not synced. There is room for it in the
/// file of the pool then.
fn finish(
    sums: &mut Sums,
    before: &Before,
    head: &mut Head,
    mut writer: ShadowWriter<'_>,
    pool: &dyn File,
) -> Result<Shadow> {
    for group in before.groups() {
        writer.push(check_place(group), &sums.check_page(&head.file_id, group))?;
    }
    head.root = sums.root(&head.file_id);
    writer.push(0, &head.encode())?;
    let len = file_len(head.len).ok_or_else(|| Error::new(ErrorKind::OutOfSpace, "a pool is too large for a file"))?;
    if pool.length()? < len {
        pool.allocate(len)?;
    }
    writer.finish(head.number, len)
}
