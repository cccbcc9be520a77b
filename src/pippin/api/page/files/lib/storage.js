// Browser storage that may be switched off or full: reads then find nothing, writes are lost.

export function readStored(storage, name) {
  try {
    return globalThis[storage].getItem(name);
  } catch {
    return null;
  }
}

export function writeStored(storage, name, value) {
  try {
    globalThis[storage].setItem(name, value);
  } catch {
    // It lasts until the page is reloaded.
  }
}
