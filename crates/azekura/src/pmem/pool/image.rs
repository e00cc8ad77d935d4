//! The files of a pool whose image is in memory: checkpoints write to them, and opening loads the image.
//!
//! Thread safe. Checkpoints and copies exclude each other, also during syncs. Readers and writers of the tree do not
//! wait for them, except a writer that finds too many copied pages (see [`dirty_pages`](crate::pmem::dirty_pages)). The
//! files are open only while they are read or written, so that any number of pools needs few file handles.
//!
//! Several threads load an image, each a group of pages at a time in file order, so that the read-ahead of the system
//! serves all of them. A group is checked and copied while it is in the processor's cache. If the shadow contains a
//! page, the page is read from the shadow directly into the image.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::base::file_format::{FileHeader, FileKind};
use crate::base::sync::lock;
use crate::base::version_edit::PartitionId;
use crate::base::{Error, ErrorKind, Result, SeqNo};
use crate::mem::pages::PAGE;
use crate::pmem::dirty_pages::PageSnapshot;
use crate::pmem::persistence::{PersistenceBackend, PoolImage};
use crate::pmem::pool::image_format::{
    CheckPage, ImageChecksums, ImageHeader, PAGE_LEN, PAGES_PER_GROUP, SavedChecksums, Shadow, ShadowWriter, file_len,
    file_page_of, file_page_of_check_page, image_page_of, page_checksum, shadow_len,
};
use crate::vfs::{Env, File, Fs, OpenMode};

/// A shadow above this length in bytes is truncated when it is not needed any more.
const SHADOW_KEEP_MAX: u64 = 8 << 20;

/// Number of bytes that are copied at a time.
const COPY_CHUNK_LEN: usize = 1 << 20;

/// The kinds of pool files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum PoolFileKind {
    /// The pool itself: a mapped pool, or the file of an image.
    Pool,
    /// The file to which a checkpoint writes its pages first.
    Shadow,
}

impl PoolFileKind {
    /// The name of the file of a partition.
    pub(crate) fn name(self, partition: PartitionId) -> String {
        let suffix = match self {
            PoolFileKind::Pool => "pool",
            PoolFileKind::Shadow => "shadow",
        };
        format!("p{:06}.{suffix}", partition.0)
    }
}

/// The partition and the kind of a pool file called `name`; `None` if it is not the name of a pool file.
pub(crate) fn parse_pool_file_name(name: &str) -> Option<(PartitionId, PoolFileKind)> {
    let partition = PartitionId(name.strip_prefix('p')?.split_once('.')?.0.parse().ok()?);
    let file = [PoolFileKind::Pool, PoolFileKind::Shadow].into_iter().find(|file| file.name(partition) == name)?;
    Some((partition, file))
}

/// An image that was loaded from files.
pub(crate) struct LoadedImage {
    pub(crate) image: PoolImage,
    /// The image contains every record up to this sequence number.
    pub(crate) replay_from: SeqNo,
    /// The highest sequence number that the image may contain. For a mapped pool both numbers are 0, because its
    /// header contains them.
    pub(crate) max_seqno: SeqNo,
    /// Whether the file is a mapped pool.
    pub(crate) is_raw: bool,
}

impl LoadedImage {
    fn raw(image: PoolImage) -> LoadedImage {
        LoadedImage { image, replay_from: SeqNo::ZERO, max_seqno: SeqNo::ZERO, is_raw: true }
    }
}

/// The cost of a checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PoolCheckpointStats {
    /// Number of image pages.
    pub(crate) pages: u64,
    /// Bytes written to all files, twice the length of the pages.
    pub(crate) bytes: u64,
}

/// The files of one pool whose image is in memory.
pub(crate) struct ImageStore {
    fs: Arc<dyn Fs>,
    dir: PathBuf,
    partition: PartitionId,
    path: PathBuf,
    read_only: bool,
    files: Mutex<ImageFiles>,
    /// Sizes in bytes of the pool file and of the shadow.
    disk_bytes: [AtomicU64; 2],
}

#[derive(Default)]
struct ImageFiles {
    /// Whether the files exist and belong to the pool.
    has_pool: bool,
    has_shadow: bool,
    /// Whether the directory entries survive power loss.
    names_are_durable: bool,
    /// The last permanent checkpoint.
    last: Option<ImageHeader>,
    /// There was no checkpoint, and the file is a mapped pool.
    is_raw: bool,
    checksums: ImageChecksums,
    /// A permanent shadow whose pages may not have been copied to the pool file yet. Until they are, the pool file is
    /// unusable without the shadow.
    pending_shadow: Option<Shadow>,
}

impl ImageStore {
    /// Opens the files of a partition's pool, and loads the image. The file may be a mapped pool; it stays unchanged
    /// until the next checkpoint has made a permanent image of it. With `never_written` there was no checkpoint yet:
    /// existing files are ignored, and the first checkpoint replaces them. Opening changes nothing. A large image is
    /// read with threads of `env`.
    ///
    /// # Errors
    /// `Corruption` if the files are damaged or missing, `Unsupported` if a newer version wrote them, `OutOfSpace` if
    /// there is no memory, and those of the files.
    pub(crate) fn open(
        fs: &Arc<dyn Fs>,
        dir: &Path,
        partition: PartitionId,
        len_max: u64,
        never_written: bool,
        read_only: bool,
        env: Option<&dyn Env>,
    ) -> Result<(ImageStore, Option<LoadedImage>)> {
        let store = ImageStore {
            fs: Arc::clone(fs),
            dir: dir.to_path_buf(),
            partition,
            path: dir.join(PoolFileKind::Pool.name(partition)),
            read_only,
            files: Mutex::default(),
            disk_bytes: Default::default(),
        };
        if never_written {
            return Ok((store, None));
        }
        let loaded = store.load(&mut lock(&store.files), len_max, env)?;
        Ok((store, Some(loaded)))
    }

    /// Whether there is an image or a complete shadow. Another file of the same name may be a mapped pool.
    ///
    /// # Errors
    /// Those of the files.
    pub(crate) fn exists(fs: &dyn Fs, dir: &Path, partition: PartitionId) -> Result<bool> {
        let shadow = dir.join(PoolFileKind::Shadow.name(partition));
        if fs.exists(&shadow)? && Shadow::read(&*fs.open(&shadow, OpenMode::Read)?)?.is_some() {
            return Ok(true);
        }
        let path = dir.join(PoolFileKind::Pool.name(partition));
        if !fs.exists(&path)? {
            return Ok(false);
        }
        let mut header = [0; FileHeader::LEN];
        let got = fs.open(&path, OpenMode::Read)?.read_at(&mut header, 0)?;
        Ok(got == header.len() && FileHeader::decode(FileKind::PoolImage, &header).is_ok())
    }

    /// The path of the pool file, for messages.
    #[cfg(test)]
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the files, as far as possible, unless they are open for reading only. No checkpoint follows.
    pub(crate) fn remove(&self) {
        if self.read_only {
            return;
        }
        let _files = lock(&self.files);
        for path in [self.path.clone(), self.shadow_path()] {
            let _found_by_the_next_open = self.fs.remove_file(&path);
        }
    }

    fn shadow_path(&self) -> PathBuf {
        self.dir.join(PoolFileKind::Shadow.name(self.partition))
    }

    /// Size of the files in bytes.
    pub(crate) fn disk_bytes(&self) -> u64 {
        self.disk_bytes.iter().map(|bytes| bytes.load(Ordering::Relaxed)).sum()
    }

    /// Number of bytes that a checkpoint needs beyond the current size of the files, for an image of `len` bytes of
    /// which `changed` pages were changed: for the shadow, and for the growth of the pool file.
    pub(crate) fn space_needed(&self, len: u64, changed: u64) -> u64 {
        if changed == 0 {
            return 0;
        }
        let [pool, shadow] = [&self.disk_bytes[0], &self.disk_bytes[1]].map(|bytes| bytes.load(Ordering::Relaxed));
        let pages = len / PAGE;
        let grows = file_len(len).unwrap_or(u64::MAX).saturating_sub(pool);
        // Those of changed pages, and of new groups.
        let checks = changed.saturating_add(grows / PAGE / PAGES_PER_GROUP + 1).min(pages.div_ceil(PAGES_PER_GROUP));
        grows.saturating_add(shadow_len(changed.min(pages) + checks + 1).saturating_sub(shadow))
    }

    fn update_disk_bytes(&self, pool: &dyn File, shadow: Option<&dyn File>) -> Result<()> {
        self.disk_bytes[0].store(pool.length()?, Ordering::Relaxed);
        self.disk_bytes[1].store(shadow.map_or(Ok(0), |shadow| shadow.length())?, Ordering::Relaxed);
        Ok(())
    }

    /// Reads the image. In a follower, another process may write a checkpoint meanwhile: then the pages that were read
    /// may be of two checkpoints. A checkpoint changes pages of the pool file only after its shadow is complete, so the
    /// pages are of one checkpoint if the newest complete one is the same before and afterwards.
    fn load(&self, files: &mut ImageFiles, len_max: u64, env: Option<&dyn Env>) -> Result<LoadedImage> {
        if !self.read_only {
            return self.load_pages(files, len_max, env);
        }
        let before = self.newest_checkpoint()?;
        let loaded = self.load_pages(files, len_max, env);
        if self.newest_checkpoint()? != before {
            return Err(Error::new(ErrorKind::Conflict, "the pool was written while it was read").in_file(&self.path));
        }
        loaded
    }

    /// Number of the newest complete checkpoint. `None` if the first page is being written, or is no image.
    fn newest_checkpoint(&self) -> Result<Option<u64>> {
        let mut page = vec![0; PAGE_LEN];
        let got = match self.fs.open(&self.path, OpenMode::Read) {
            Ok(pool) => pool.read_at(&mut page, 0)?,
            Err(error) if error.is_missing_file() => 0,
            Err(error) => return Err(error),
        };
        let pool = ImageHeader::decode(&page[..got]).ok().map(|head| head.checkpoint_number);
        let shadow = match self.fs.open(&self.shadow_path(), OpenMode::Read) {
            Ok(shadow) => Shadow::read(&*shadow)?.map(|shadow| shadow.checkpoint_number),
            Err(error) if error.is_missing_file() => None,
            Err(error) => return Err(error),
        };
        Ok(pool.max(shadow))
    }

    fn load_pages(&self, files: &mut ImageFiles, len_max: u64, env: Option<&dyn Env>) -> Result<LoadedImage> {
        let mode = if self.read_only { OpenMode::Read } else { OpenMode::Write };
        if !self.fs.exists(&self.path)? {
            return Err(Error::corruption("the file of a pool is missing").in_file(&self.path));
        }
        let pool = self.fs.open(&self.path, mode)?;
        let mut page = vec![0; PAGE_LEN];
        let got = pool.read_at(&mut page, 0)?;
        page.truncate(got);
        let head = ImageHeader::decode(&page);
        let shadow_path = self.shadow_path();
        let mut shadow_file = None;
        if self.fs.exists(&shadow_path)? {
            let shadow = self.fs.open(&shadow_path, mode)?;
            // A device that ignores a sync may leave a shadow that is older than the pool file. Such a shadow is
            // ignored.
            let of_use = |found: &Shadow| match &head {
                Ok(head) => head.file_id == found.file_id && head.checkpoint_number <= found.checkpoint_number,
                // The first page is torn, and the shadow repairs it; or the file is a mapped pool, and the shadow is
                // its first image.
                Err(_) => FileHeader::decode(FileKind::Pool, &page).map_or(true, |pool| pool.file_id == found.file_id),
            };
            files.pending_shadow = Shadow::read(&*shadow)?.filter(of_use);
            if files.pending_shadow.is_some() && !self.read_only {
                // A process that was killed may have left the shadow complete and not durable. The WAL may not
                // contain its records any more, and its pages will overwrite those of the last checkpoint.
                shadow.sync_data()?;
                self.fs.sync_dir(&self.dir)?;
            }
            shadow_file = Some(shadow);
        }
        (files.has_pool, files.has_shadow) = (true, shadow_file.is_some());
        files.names_are_durable = !self.read_only;
        files.is_raw = files.pending_shadow.is_none() && FileHeader::decode(FileKind::Pool, &page).is_ok();
        // Opening changes no file: the next checkpoint first copies the pages of the shadow to the pool file.
        let newer = files.pending_shadow.as_ref().zip(shadow_file.as_deref());
        let loaded = match files.is_raw {
            true => load_raw(&*pool, len_max).map(LoadedImage::raw),
            false => load_image(&pool, page, newer, self.partition, len_max, env).map(|(image, sums, head)| {
                let (replay_from, highest) = (head.replay_from, head.max_seqno);
                (files.checksums, files.last) = (sums, Some(head));
                LoadedImage { image, replay_from, max_seqno: highest, is_raw: false }
            }),
        };
        let loaded = loaded.map_err(|error| error.in_file(&self.path))?;
        self.update_disk_bytes(&*pool, shadow_file.as_deref())?;
        Ok(loaded)
    }

    /// Writes the pages that changed since the last checkpoint to the files. `cut` is called once, before any page is
    /// copied, and returns the last visible sequence number of that time. `make_durable` is called with that number
    /// once the pages are copied, before the shadow becomes valid. It returns once the WAL is durable through every
    /// record that the pages may contain, and returns the highest of their sequence numbers.
    ///
    /// # Errors
    /// Those of the callbacks and of the files, `Invalid` if the database was opened read-only. Then the files
    /// contain the last checkpoint, or already this one, and the next checkpoint writes all changed pages again.
    pub(crate) fn checkpoint(
        &self,
        image: &PoolImage,
        cut: &mut dyn FnMut() -> SeqNo,
        make_durable: &mut dyn FnMut(SeqNo) -> Result<SeqNo>,
    ) -> Result<PoolCheckpointStats> {
        if self.read_only {
            return Err(Error::invalid("the database is open for reading only"));
        }
        let files = &mut *lock(&self.files);
        let (pool, shadow) = self.open_for_write(files)?;
        // The shadow must not be overwritten while the pool file still needs its pages.
        apply_pending_shadow(files, &*pool, &*shadow)?;
        let replay_from = cut();
        let mut snapshot = image.snapshot_pages()?;
        let file_id = pool_file_id(image)?;
        let mut writer = ShadowWriter::new(&*shadow, file_id);
        let changed = copy_pages(&mut snapshot, &mut writer)?;
        let highest = make_durable(replay_from)?;
        debug_assert!(replay_from <= highest, "the image contains no lower sequence numbers than it must");
        let (number, len) = (files.last.as_ref().map_or(1, |last| last.checkpoint_number + 1), snapshot.image_len());
        let mut head = ImageHeader {
            file_id,
            partition: self.partition,
            checkpoint_number: number,
            replay_from,
            max_seqno: highest,
            image_len: len,
            root_checksum: 0,
        };
        files.checksums.reserve(len / PAGE)?;
        let before = files.checksums.replace_pages(&changed, len / PAGE);
        let finished = finish_shadow(&mut files.checksums, &before, &mut head, writer, &*pool);
        let permanent = finished.and_then(|finished| {
            shadow.sync_data()?;
            if !files.names_are_durable {
                self.fs.sync_dir(&self.dir)?;
            }
            Ok(finished)
        });
        let owed = match permanent {
            Ok(owed) => owed,
            Err(error) => {
                files.checksums.restore(&before);
                // The shadow may be complete in the page cache and not durable, and a sync after a failed sync may
                // report success. A process that opens the pool after this process was killed must not find it.
                let _device_is_gone = invalidate_shadow(&*shadow).or_else(|_| shadow.set_length(0));
                return Err(error);
            }
        };
        let written = PoolCheckpointStats { pages: changed.len() as u64, bytes: 2 * owed.page_count() * PAGE };
        (files.names_are_durable, files.last, files.pending_shadow) = (true, Some(head), Some(owed));
        apply_pending_shadow(files, &*pool, &*shadow)?;
        snapshot.finish();
        self.update_disk_bytes(&*pool, Some(&*shadow))?;
        Ok(written)
    }

    /// Opens the pool file and the shadow, and creates them if necessary.
    fn open_for_write(&self, files: &mut ImageFiles) -> Result<(Arc<dyn File>, Arc<dyn File>)> {
        // A file that the pool needs and that is missing is an error.
        let open = |path: &Path, is_there: bool| match is_there || self.fs.exists(path)? {
            true => self.fs.open(path, OpenMode::Write),
            false => self.fs.open(path, OpenMode::Create),
        };
        let pool = open(&self.path, files.has_pool)?;
        files.has_pool = true;
        if !files.has_shadow {
            files.names_are_durable = false;
            // Before the first checkpoint, an existing shadow belongs to no checkpoint of this pool.
            if files.last.is_none() && self.fs.exists(&self.shadow_path())? {
                self.fs.remove_file(&self.shadow_path())?;
            }
        }
        let shadow = open(&self.shadow_path(), files.has_shadow)?;
        files.has_shadow = true;
        Ok((pool, shadow))
    }

    /// Copies the files, as of the last checkpoint, to another directory, and syncs the copies. The caller syncs the
    /// directory. Copies nothing if there was no checkpoint.
    ///
    /// # Errors
    /// Those of the files.
    pub(crate) fn copy_to(&self, dir: &Path) -> Result<()> {
        let files = lock(&self.files);
        if files.last.is_none() && !files.is_raw {
            return Ok(());
        }
        let shadow = self.shadow_path();
        let shadow = files.pending_shadow.is_some().then_some((&shadow, PoolFileKind::Shadow));
        for (path, kind) in [(&self.path, PoolFileKind::Pool)].into_iter().chain(shadow) {
            self.copy(&*self.fs.open(path, OpenMode::Read)?, &dir.join(kind.name(self.partition)))?;
        }
        Ok(())
    }

    /// Copies the files of a pool that another process writes to another directory, and syncs the copies. Copies
    /// nothing if there was no checkpoint.
    ///
    /// # Errors
    /// `Conflict` if a checkpoint was written meanwhile; those of the files.
    pub(crate) fn copy_beside_writer(fs: &Arc<dyn Fs>, dir: &Path, partition: PartitionId, to: &Path) -> Result<()> {
        let (store, _) = ImageStore::open(fs, dir, partition, 0, true, true, None)?;
        let before = store.newest_checkpoint()?;
        for kind in [PoolFileKind::Pool, PoolFileKind::Shadow] {
            let name = kind.name(partition);
            match fs.open(&dir.join(&name), OpenMode::Read) {
                Err(error) if error.is_missing_file() => {}
                file => store.copy(&*file?, &to.join(&name))?,
            }
        }
        match store.newest_checkpoint()? == before {
            true => Ok(()),
            false => {
                Err(Error::new(ErrorKind::Conflict, "the pool was written while it was copied").in_file(store.path))
            }
        }
    }

    fn copy(&self, file: &dyn File, path: &Path) -> Result<()> {
        let target = self.fs.open(path, OpenMode::Create)?;
        let (len, mut piece) = (file.length()?, vec![0; COPY_CHUNK_LEN]);
        target.set_length(len)?;
        let mut at = 0;
        while at < len {
            let got = file.read_at(&mut piece, at)?;
            // A range that was never written stays a hole.
            if piece[..got].iter().any(|byte| *byte != 0) {
                target.write_at(&piece[..got], at)?;
            }
            at += got.max(1) as u64;
        }
        target.sync_data()
    }
}

/// Copies the pages of a pending shadow to the pool file. Then the shadow is not needed any more.
fn apply_pending_shadow(files: &mut ImageFiles, pool: &dyn File, shadow: &dyn File) -> Result<()> {
    let Some(owed) = &files.pending_shadow else { return Ok(()) };
    owed.apply(shadow, pool)?;
    pool.sync_data()?;
    let whole = owed.target_file_len();
    files.pending_shadow = None;
    // The bytes behind the image are ignored.
    let _ = match pool.length() {
        Ok(len) if len > whole => pool.set_length(whole),
        _ => Ok(()),
    };
    // It does not matter whether this succeeds and is durable, because applying the shadow again changes nothing.
    let _ = match shadow.length() {
        Ok(len) if len > SHADOW_KEEP_MAX || len / 2 > whole => shadow.set_length(0),
        _ => invalidate_shadow(shadow),
    };
    Ok(())
}

/// Invalidates a shadow, so that opening ignores it. Not synced.
fn invalidate_shadow(shadow: &dyn File) -> Result<()> {
    shadow.write_at(&[0; FileHeader::LEN], 0)
}

/// The id in the header of the pool, which never changes. It binds the files to the pool.
fn pool_file_id(image: &PoolImage) -> Result<[u8; 16]> {
    let mut header = [0; FileHeader::LEN];
    if !image.region().contains(0, PAGE) {
        return Err(Error::invalid("an empty pool has no checkpoint"));
    }
    image.region().read(0, &mut header);
    Ok(FileHeader::decode(FileKind::Pool, &header)?.file_id)
}

/// Writes the pages of a snapshot to a shadow. Returns (page number, checksum) for each.
fn copy_pages(taken: &mut PageSnapshot<'_>, writer: &mut ShadowWriter<'_>) -> Result<Vec<(u64, u64)>> {
    let (mut page, mut changed) = (vec![0; PAGE_LEN], Vec::new());
    while let Some(number) = taken.next_page(&mut page) {
        changed.push((number, writer.push(file_page_of(number), &page)?));
    }
    Ok(changed)
}

/// Adds the check pages and the first page to a shadow, and makes it valid. The shadow is not synced. Space for its
/// pages is allocated in the pool file.
fn finish_shadow(
    sums: &mut ImageChecksums,
    before: &SavedChecksums,
    head: &mut ImageHeader,
    mut writer: ShadowWriter<'_>,
    pool: &dyn File,
) -> Result<Shadow> {
    for group in before.groups() {
        writer.push(file_page_of_check_page(group), &sums.encode_check_page(&head.file_id, group))?;
    }
    head.root_checksum = sums.root_checksum(&head.file_id);
    writer.push(0, &head.encode())?;
    let len =
        file_len(head.image_len).ok_or_else(|| Error::new(ErrorKind::OutOfSpace, "a pool is too large for a file"))?;
    if pool.length()? < len {
        pool.allocate(len)?;
    }
    writer.finish(head.checkpoint_number, len)
}

/// Number of pages that are read at a time: 256 KiB.
const READ_CHUNK_PAGES: u64 = 64;

/// The pages of a shadow, as needed to load an image.
#[derive(Default)]
struct ShadowPages {
    /// Their positions in the pool file.
    file_pages: HashSet<u64>,
    /// The first page and the check pages.
    metadata_pages: HashMap<u64, Vec<u8>>,
}

impl ShadowPages {
    fn read(shadow: Option<(&Shadow, &dyn File)>) -> Result<ShadowPages> {
        let mut newer = ShadowPages::default();
        if let Some((shadow, file)) = shadow {
            newer.file_pages = shadow.file_pages().collect();
            shadow.for_each_page(file, |place, page| {
                if image_page_of(place).is_none() {
                    newer.metadata_pages.insert(place, page.to_vec());
                }
                Ok(())
            })?;
        }
        Ok(newer)
    }
}

/// State that all reading threads share.
struct ImageLoad {
    pool: Arc<dyn File>,
    header: ImageHeader,
    image: PoolImage,
    shadow_pages: ShadowPages,
    /// The next group that no thread has taken.
    next_group: AtomicU64,
    failed: AtomicBool,
    groups_read: Mutex<Vec<(u64, Result<CheckPage>)>>,
}

/// Loads and checks the image in `pool`. Pages of the shadow replace those of the file. `first` is the first page of
/// the file, which may be incomplete.
///
/// # Errors
/// `Corruption` if the image is damaged, `OutOfSpace` if there is no memory, and those of the files.
pub(crate) fn load_image(
    pool: &Arc<dyn File>,
    first: Vec<u8>,
    shadow: Option<(&Shadow, &dyn File)>,
    partition: PartitionId,
    len_max: u64,
    env: Option<&dyn Env>,
) -> Result<(PoolImage, ImageChecksums, ImageHeader)> {
    let newer = ShadowPages::read(shadow)?;
    let head = ImageHeader::decode(newer.metadata_pages.get(&0).unwrap_or(&first))?;
    if shadow.is_some_and(|(shadow, _)| Some(shadow.target_file_len()) != file_len(head.image_len)) {
        return Err(Error::corruption("the shadow belongs to a file of a different length").at_offset(0));
    }
    if head.partition != partition {
        return Err(Error::corruption("the file belongs to another partition").at_offset(0));
    }
    let whole = file_len(head.image_len).is_some_and(|len| pool.length().is_ok_and(|there| len <= there));
    if !whole && (newer.file_pages.is_empty() || head.image_len > len_max) {
        return Err(Error::corruption("the file is shorter than the image").at_offset(pool.length()?));
    }
    let image = PoolImage::for_existing(head.image_len.max(PAGE), head.image_len.saturating_add(len_max))?;
    image.grow(head.image_len)?;
    let mut sums = ImageChecksums::default();
    sums.grow(head.image_len / PAGE)?;
    let (len, groups) = (head.image_len, (head.image_len / PAGE).div_ceil(PAGES_PER_GROUP));
    let (next, failed, read) = (AtomicU64::new(0), AtomicBool::new(false), Mutex::default());
    let load = ImageLoad {
        pool: Arc::clone(pool),
        header: head,
        image,
        shadow_pages: newer,
        next_group: next,
        failed,
        groups_read: read,
    };
    let load =
        run_with_helpers(load, env, len, groups.saturating_sub(1), ImageLoad::load_groups, ImageLoad::load_groups)?;
    let mut read = load.groups_read.into_inner().unwrap_or_else(PoisonError::into_inner);
    // The damage with the lowest position is reported, whichever thread found it.
    read.sort_unstable_by_key(|(group, _)| *group);
    for (group, page) in read {
        sums.load_check_page(group, page?);
    }
    let (image, head) = (load.image, load.header);
    if sums.root_checksum(&head.file_id) != head.root_checksum {
        return Err(Error::corruption("the file contains pages of different checkpoints").at_offset(0));
    }
    if let Some((shadow, file)) = shadow {
        shadow.for_each_page(file, |place, page| {
            match image_page_of(place).filter(|number| *number < head.image_len / PAGE) {
                Some(number) => load_page(&image, &head, number, sums.page_checksum(number), page),
                None => Ok(()),
            }
        })?;
    }
    Ok((image, sums, head))
}

/// Loads a mapped pool where it cannot be mapped any more. Marks every page, so that the next checkpoint writes it.
///
/// # Errors
/// As [`load_image`].
pub(crate) fn load_raw(pool: &dyn File, len_max: u64) -> Result<PoolImage> {
    let len = pool.length()? / PAGE * PAGE;
    let image = PoolImage::for_existing(len.max(PAGE), len.saturating_add(len_max))?;
    image.grow(len)?;
    let mut piece = vec![0; READ_CHUNK_PAGES as usize * PAGE_LEN];
    for at in (0..len).step_by(piece.len()) {
        let piece = &mut piece[..(len - at).min(READ_CHUNK_PAGES * PAGE) as usize];
        pool.read_exact_at(piece, at)?;
        image.write(at, &[piece]);
    }
    Ok(image)
}

/// Checks a page and stores it into the image.
fn load_page(image: &PoolImage, head: &ImageHeader, number: u64, sum: u64, page: &[u8]) -> Result<()> {
    // The page was never written: it is zero, regardless of the bytes in the file.
    if sum == 0 {
        return Ok(());
    }
    if page_checksum(&head.file_id, file_page_of(number), page) != sum {
        return Err(Error::corruption("checksum of a page does not match").at_offset(file_page_of(number) * PAGE));
    }
    image.load_words(number * PAGE, page);
    Ok(())
}

impl ImageLoad {
    /// Reads groups until there are no more, or one has failed.
    fn load_groups(&self) {
        let mut bytes = vec![0; READ_CHUNK_PAGES as usize * PAGE_LEN];
        loop {
            let group = self.next_group.fetch_add(1, Ordering::Relaxed);
            if group * PAGES_PER_GROUP >= self.header.image_len / PAGE || self.failed.load(Ordering::Relaxed) {
                return;
            }
            let read = self.group(group, &mut bytes);
            if read.is_err() {
                self.failed.store(true, Ordering::Relaxed);
            }
            lock(&self.groups_read).push((group, read));
        }
    }

    /// Reads the pages of a group, beginning with its check page.
    fn group(&self, group: u64, bytes: &mut [u8]) -> Result<CheckPage> {
        let (first, start) = (group * PAGES_PER_GROUP, file_page_of_check_page(group));
        let count = PAGES_PER_GROUP.min(self.header.image_len / PAGE - first);
        let mut known = None;
        for from in (0..=count).step_by(READ_CHUNK_PAGES as usize) {
            let pages = READ_CHUNK_PAGES.min(1 + count - from);
            let bytes = &mut bytes[..pages as usize * PAGE_LEN];
            // Bytes behind the end of the file are zero.
            let got = self.pool.read_at(bytes, (start + from) * PAGE)?;
            bytes[got..].fill(0);
            let mut rest = (from..).zip(bytes.chunks_exact(PAGE_LEN));
            let check = match known.take() {
                Some(check) => check,
                None => {
                    let page = rest.next().map_or(&[][..], |(_, page)| page);
                    let page = self.shadow_pages.metadata_pages.get(&start).map_or(page, Vec::as_slice);
                    CheckPage::read(&self.header.file_id, group, count, page)?
                }
            };
            for (n, page) in rest.filter(|(n, _)| !self.shadow_pages.file_pages.contains(&(start + n))) {
                load_page(&self.image, &self.header, first + n - 1, check.page_checksum(n - 1), page)?;
            }
            known = Some(check);
        }
        known.ok_or_else(|| Error::corruption("a group has no check page"))
    }
}

/// Number of bytes of a pool per helper thread, and maximum number of helpers. In tests the number of bytes is small.
const BYTES_PER_HELPER: u64 = if cfg!(all(test, debug_assertions)) { 16 << 10 } else { 16 << 20 };
const HELPERS_MAX: u64 = 3;

/// The error if one of the threads panicked.
pub(crate) fn thread_panicked_error() -> Error {
    Error::new(ErrorKind::Poisoned, "a thread panicked while it read a pool")
}

/// Runs `work` on `shared` in helper threads of `env`, one per [`BYTES_PER_HELPER`] of `bytes` and at most `most`,
/// while this thread runs `lead`. Returns `shared` once all of them have ended.
///
/// # Errors
/// `Poisoned` if a helper panicked.
pub(crate) fn run_with_helpers<T: Send + Sync + 'static>(
    shared: T,
    env: Option<&dyn Env>,
    bytes: u64,
    most: u64,
    lead: impl FnOnce(&T),
    work: fn(&T),
) -> Result<T> {
    let shared = Arc::new(shared);
    let helpers = (bytes / BYTES_PER_HELPER).min(HELPERS_MAX).min(most);
    let mut threads = Vec::new();
    for env in (0..helpers).filter_map(|_| env) {
        let theirs = Arc::clone(&shared);
        // If no thread can be started, this thread does the helper's share.
        threads.extend(env.spawn("azekura-open", Box::new(move || work(&theirs))));
    }
    lead(&shared);
    let panics = threads.into_iter().map(|thread| thread.join()).filter(|ended| !ended).count();
    Arc::into_inner(shared).filter(|_| panics == 0).ok_or_else(thread_panicked_error)
}
