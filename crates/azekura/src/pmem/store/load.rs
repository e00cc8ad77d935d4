//! Reading the image of a pool into memory.
//!
//! Several threads read, each a group of pages at a time, in the order of the file, so that the system reads ahead for
//! all of them; a piece is checked and copied while it is in the processor's cache, and others read the next ones. A
//! page that the shadow has is not looked at in the file: it comes from there, straight into the image.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::base::sync::lock;
use crate::base::version_edit::PartitionId;
use crate::base::{Error, Result};
use crate::mem::region::PAGE;
use crate::pmem::crew::run_with_helpers;
use crate::pmem::persistence::{PersistenceBackend, PoolImage};
use crate::pmem::store::format::{
    CheckPage, ImageChecksums, ImageHeader, PAGE_LEN, PAGES_PER_GROUP, file_len, file_page_of, file_page_of_check_page,
    image_page_of, page_checksum,
};
use crate::pmem::store::shadow::Shadow;
use crate::vfs::{Env, File};

/// Pages that are read at once: 256 KiB.
const READ_CHUNK_PAGES: u64 = 64;

/// Pages of a shadow.
#[derive(Default)]
struct ShadowPages {
    /// Where they belong.
    file_pages: HashSet<u64>,
    /// Those that say something about others.
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

/// What all who read need.
struct ImageLoad {
    pool: Arc<dyn File>,
    header: ImageHeader,
    image: PoolImage,
    shadow_pages: ShadowPages,
    /// The next group that nobody reads yet.
    next_group: AtomicU64,
    failed: AtomicBool,
    groups_read: Mutex<Vec<(u64, Result<CheckPage>)>>,
}

/// Reads and checks the image in `pool`, whose first page, as far as there is one, is `first`, under the pages of a
/// shadow.
///
/// # Errors
/// `Corruption` if it is not what was written, `OutOfSpace` if there is no memory, and those of the files.
pub(super) fn load_image(
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
        return Err(Error::corruption("the shadow is of a file of another length").at_offset(0));
    }
    if head.partition != partition {
        return Err(Error::corruption("the file belongs to another partition").at_offset(0));
    }
    let whole = file_len(head.image_len).is_some_and(|len| pool.length().is_ok_and(|there| len <= there));
    if !whole && (newer.file_pages.is_empty() || head.image_len > len_max) {
        return Err(Error::corruption("the file ends before the image does").at_offset(pool.length()?));
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
    // What is wrong first is told first, whoever came to it.
    read.sort_unstable_by_key(|(group, _)| *group);
    for (group, page) in read {
        sums.load_check_page(group, page?);
    }
    let (image, head) = (load.image, load.header);
    if sums.root_checksum(&head.file_id) != head.root_checksum {
        return Err(Error::corruption("pages of different checkpoints lie in one file").at_offset(0));
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

/// Reads a pool that was used as memory where it cannot be any more: every page of it is still to be written.
///
/// # Errors
/// As [`load_image`].
pub(super) fn load_raw(pool: &dyn File, len_max: u64) -> Result<PoolImage> {
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

/// Checks a page and puts it into the image.
fn load_page(image: &PoolImage, head: &ImageHeader, number: u64, sum: u64, page: &[u8]) -> Result<()> {
    // It was never written: zeros, whatever stands in its place.
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
    /// Reads groups until there are none left, or one is refused.
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

    /// Reads the pages of a group, its check page first.
    fn group(&self, group: u64, bytes: &mut [u8]) -> Result<CheckPage> {
        let (first, start) = (group * PAGES_PER_GROUP, file_page_of_check_page(group));
        let count = PAGES_PER_GROUP.min(self.header.image_len / PAGE - first);
        let mut known = None;
        for from in (0..=count).step_by(READ_CHUNK_PAGES as usize) {
            let pages = READ_CHUNK_PAGES.min(1 + count - from);
            let bytes = &mut bytes[..pages as usize * PAGE_LEN];
            // What is behind the end of the file is zero.
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
