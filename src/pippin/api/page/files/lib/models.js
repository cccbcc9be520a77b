// The models of the server, and the one that is chosen. Knows no elements.

let models = []; // { id, max_model_len }
let chosen = null;

// Other names of a model are left out: `root` is the name that it has here.
export function setModels(listed) {
  models = listed.filter(({ id, root }) => root === undefined || root === id);
  chosen = models[0];
}

export const allModels = () => models;

// The model of that name, or the first; null before the server has one.
export function chooseModel(id) {
  chosen = models.find((model) => model.id === id) ?? models[0] ?? null;
  return chosen;
}

// A path about the engine of the chosen model; of several replicas, the one that the page's own
// address names: `/?replica=1`.
export function ofChosen(path) {
  const replica = new URLSearchParams(location.search).get("replica");
  const query = new URLSearchParams({
    ...(models.length > 1 && { model: chosen.id }),
    ...(replica !== null && { replica }),
  });
  return query.size > 0 ? `${path}?${query}` : path;
}
