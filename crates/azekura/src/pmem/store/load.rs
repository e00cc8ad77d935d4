//! Reading the image of a pool into memory.
//!
//! Several threads read, each a group of pages at a time, in the order of the file, so that the system reads ahead for
//! all of them; a piece is checked and copied while it is in the processor's cache, and others read the next ones. A
//! page that the shadow has is not looked at in the file: it comes from there, straight into the image.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::base::edit::PartitionId;
use crate::base::sync::lock;
use crate::base::{Error, Result};
use crate::mem::region::PAGE;
use crate::pmem::crew::together;
use crate::pmem::medium::{Image, Medium};
use crate::pmem::store::format::{
    CheckPage, GROUP, Head, PAGE_LEN, Sums, check_place, file_len, page_at, page_sum, place,
};
use crate::pmem::store::shadow::Shadow;
use crate::vfs::{Env, File};

/// Pages that are read at once: 256 KiB.
const PIECE: u64 = 64;

/// Pages of a shadow.
#[derive(Default)]
struct Newer {
    /// Where they belong.
    places: HashSet<u64>,
    /// Those that say something about others.
    heads: HashMap<u64, Vec<u8>>,
}

impl Newer {
    fn of(shadow: Option<(&Shadow, &dyn File)>) -> Result<Newer> {
        let mut newer = Newer::default();
        if let Some((shadow, file)) = shadow {
            newer.places = shadow.places().collect();
            shadow.each(file, |place, page| {
                if page_at(place).is_none() {
                    newer.heads.insert(place, page.to_vec());
                }
                Ok(())
            })?;
        }
        Ok(newer)
    }
}

/// What all who read need.
struct Load {
    pool: Arc<dyn File>,
    head: Head,
    image: Image,
    newer: Newer,
    /// The next group that nobody reads yet.
    next: AtomicU64,
    failed: AtomicBool,
    read: Mutex<Vec<(u64, Result<CheckPage>)>>,
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
) -> Result<(Image, Sums, Head)> {
    let newer = Newer::of(shadow)?;
    let head = Head::decode(newer.heads.get(&0).unwrap_or(&first))?;
    if shadow.is_some_and(|(shadow, _)| Some(shadow.file_len()) != file_len(head.len)) {
        return Err(Error::corruption("the shadow is of a file of another length").at_offset(0));
    }
    if head.partition != partition {
        return Err(Error::corruption("the file belongs to another partition").at_offset(0));
    }
    let whole = file_len(head.len).is_some_and(|len| pool.length().is_ok_and(|there| len <= there));
    if !whole && (newer.places.is_empty() || head.len > len_max) {
        return Err(Error::corruption("the file ends before the image does").at_offset(pool.length()?));
    }
    let image = Image::for_stored(head.len.max(PAGE), head.len.saturating_add(len_max))?;
    image.grow(head.len)?;
    let mut sums = Sums::default();
    sums.grow(head.len / PAGE)?;
    let (len, groups) = (head.len, (head.len / PAGE).div_ceil(GROUP));
    let (next, failed, read) = (AtomicU64::new(0), AtomicBool::new(false), Mutex::default());
    let load = Load { pool: Arc::clone(pool), head, image, newer, next, failed, read };
    let load = together(load, env, len, groups.saturating_sub(1), Load::work, Load::work)?;
    let mut read = load.read.into_inner().unwrap_or_else(PoisonError::into_inner);
    // What is wrong first is told first, whoever came to it.
    read.sort_unstable_by_key(|(group, _)| *group);
    for (group, page) in read {
        sums.take(group, page?);
    }
    let (image, head) = (load.image, load.head);
    if sums.root(&head.file_id) != head.root {
        return Err(Error::corruption("pages of different checkpoints lie in one file").at_offset(0));
    }
    if let Some((shadow, file)) = shadow {
        shadow.each(file, |place, page| match page_at(place).filter(|number| *number < head.len / PAGE) {
            Some(number) => fill(&image, &head, number, sums.of(number), page),
            None => Ok(()),
        })?;
    }
    Ok((image, sums, head))
}

/// Reads a pool that was used as memory where it cannot be any more: every page of it is still to be written.
///
/// # Errors
/// As [`load_image`].
pub(super) fn load_raw(pool: &dyn File, len_max: u64) -> Result<Image> {
    let len = pool.length()? / PAGE * PAGE;
    let image = Image::for_stored(len.max(PAGE), len.saturating_add(len_max))?;
    image.grow(len)?;
    let mut piece = vec![0; PIECE as usize * PAGE_LEN];
    for at in (0..len).step_by(piece.len()) {
        let piece = &mut piece[..(len - at).min(PIECE * PAGE) as usize];
        pool.read_exact_at(piece, at)?;
        image.write(at, &[piece]);
    }
    Ok(image)
}

/// Checks a page and puts it into the image.
fn fill(image: &Image, head: &Head, number: u64, sum: u64, page: &[u8]) -> Result<()> {
    // It was never written: zeros, whatever stands in its place.
    if sum == 0 {
        return Ok(());
    }
    if page_sum(&head.file_id, place(number), page) != sum {
        return Err(Error::corruption("checksum of a page does not match").at_offset(place(number) * PAGE));
    }
    image.load(number * PAGE, page);
    Ok(())
}

impl Load {
    /// Reads groups until there are none left, or one is refused.
    fn work(&self) {
        let mut bytes = vec![0; PIECE as usize * PAGE_LEN];
        loop {
            let group = self.next.fetch_add(1, Ordering::Relaxed);
            if group * GROUP >= self.head.len / PAGE || self.failed.load(Ordering::Relaxed) {
                return;
            }
            let read = self.group(group, &mut bytes);
            if read.is_err() {
                self.failed.store(true, Ordering::Relaxed);
            }
            lock(&self.read).push((group, read));
        }
    }

    /// Reads the pages of a group, its check page first.
    fn group(&self, group: u64, bytes: &mut [u8]) -> Result<CheckPage> {
        let (first, start) = (group * GROUP, check_place(group));
        let count = GROUP.min(self.head.len / PAGE - first);
        let mut known = None;
        for from in (0..=count).step_by(PIECE as usize) {
            let pages = PIECE.min(1 + count - from);
            let bytes = &mut bytes[..pages as usize * PAGE_LEN];
            // What is behind the end of the file is zero.
            let got = self.pool.read_at(bytes, (start + from) * PAGE)?;
            bytes[got..].fill(0);
            let mut rest = (from..).zip(bytes.chunks_exact(PAGE_LEN));
            let check = match known.take() {
                Some(check) => check,
                None => {
                    let page = rest.next().map_or(&[][..], |(_, page)| page);
                    let page = self.newer.heads.get(&start).map_or(page, Vec::as_slice);
                    CheckPage::read(&self.head.file_id, group, count, page)?
                }
            };
            for (n, page) in rest.filter(|(n, _)| !self.newer.places.contains(&(start + n))) {
                fill(&self.image, &self.head, first + n - 1, check.of(n - 1), page)?;
            }
            known = Some(check);
        }
        known.ok_or_else(|| Error::corruption("a group has no check page"))
    }
}
