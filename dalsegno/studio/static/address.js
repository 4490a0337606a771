// The address of a page holds all of its state, so that it can be sent, kept, and gone back to.
//
//   #/events?source=b1&id=plain&seq=17

let waiting = 0;

/** The screen and its values. */
export function read() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { screen: path || "requests", values: new URLSearchParams(query) };
}

/** The address of a screen. Values that are empty are left out. */
export function of(screen, values) {
  const query = new URLSearchParams();
  const pairs = values instanceof URLSearchParams ? [...values] : Object.entries(values);
  for (const [name, value] of pairs) {
    if (value !== null && value !== undefined && value !== "") query.append(name, value);
  }
  const text = query.toString();
  return `#/${screen}${text ? `?${text}` : ""}`;
}

/** Go to a screen. */
export function go(screen, values) {
  location.hash = of(screen, values);
}

/** Note values of the present screen, which shows them already. Browsers allow this some times a second only. */
export function note(values) {
  clearTimeout(waiting);
  const { screen } = read();
  waiting = setTimeout(() => {
    if (read().screen === screen) history.replaceState(null, "", of(screen, merged(values)));
  }, 150);
}

/** Forget values that wait to be noted: another screen is shown. */
export function forget() {
  clearTimeout(waiting);
}

function merged(values) {
  const all = read().values;
  for (const [name, value] of Object.entries(values)) {
    if (value === null || value === undefined || value === "") all.delete(name);
    else all.set(name, value);
  }
  return all;
}
