//! Bounds what all threads encode at a time.

use std::sync::{Condvar, Mutex};

/// Bytes that all threads together encode at a time: the crate takes several hundred bytes of memory for each of them.
const ROOM: usize = 128 << 10;
/// Shorter texts are not counted.
const SHORT: usize = 8 << 10;

/// Room for the texts that are being encoded.
#[derive(Default)]
pub struct Room {
    held: Mutex<usize>,
    changed: Condvar,
}

/// The place of a text, which is given back when it is dropped.
pub struct Place<'a>(&'a Room, usize);

impl Room {
    /// Waits for the place of a text of so many bytes. One that is longer than the room gets all of it.
    pub fn take(&self, bytes: usize) -> Option<Place<'_>> {
        let bytes = bytes.min(ROOM);
        if bytes < SHORT {
            return None;
        }
        let held = self.held.lock().expect("no holder panics");
        let has_no_room = |held: &mut usize| *held + bytes > ROOM;
        *self.changed.wait_while(held, has_no_room).expect("no holder panics") += bytes;
        Some(Place(self, bytes))
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        *self.0.held.lock().expect("no holder panics") -= self.1;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    #[test]
    fn threads_share_the_room() {
        let (room, now, most) = (Room::default(), AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for thread in 1..=8 {
                let (room, now, most) = (&room, &now, &most);
                scope.spawn(move || {
                    for bytes in [1, SHORT, thread * ROOM / 5, 3 * ROOM] {
                        let place = room.take(bytes);
                        assert_eq!(place.is_some(), bytes >= SHORT);
                        let counted = place.as_ref().map_or(0, |place| place.1);
                        most.fetch_max(now.fetch_add(counted, SeqCst) + counted, SeqCst);
                        std::thread::yield_now();
                        now.fetch_sub(counted, SeqCst);
                    }
                });
            }
        });
        assert_eq!((most.into_inner(), *room.held.lock().unwrap()), (ROOM, 0));
    }
}
