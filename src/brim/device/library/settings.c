/* The device's settings: one environment variable, "name=NVIDIA L40S;count=1;memory_bytes=...".
 *
 * brim.device.settings writes it; every figure comes from there, so the catalog stays the only list of cards. Without
 * the variable there is no device. A key or value that is not understood ends the process: a rehearsal on another card
 * than the one asked for would be a wrong answer. */
#include "device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define VARIABLE "BRIM_REHEARSAL_DEVICE"

Settings settings = {.copy_limit_bytes = SIZE_MAX};

static const struct {
  const char *key;
  size_t offset, size;
} numbers[] = {
#define NUMBER(field) {#field, offsetof(Settings, field), sizeof settings.field}
    NUMBER(count),           NUMBER(capability),
    NUMBER(multiprocessors), NUMBER(memory_bytes),
    NUMBER(context_bytes),   NUMBER(l2_bytes),
    NUMBER(shared_per_multiprocessor_bytes),
    NUMBER(shared_per_block_bytes),
    NUMBER(threads_per_multiprocessor),
    NUMBER(blocks_per_multiprocessor),
    NUMBER(bus_bits),        NUMBER(copy_limit_bytes),
    NUMBER(cudnn_workspace_bytes),
    NUMBER(seed),
};

static void refuse(const char *problem, const char *text) {
  fprintf(stderr, "brim: " VARIABLE ": %s: %s\n", problem, text);
  exit(2);
}

static void set_number(const char *key, const char *text) {
  char *end;
  unsigned long long value = strtoull(text, &end, 10);
  if (end == text || *end) refuse("not a whole number", text);
  for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
    if (strcmp(numbers[i].key, key)) continue;
    char *field = (char *)&settings + numbers[i].offset;
    if (numbers[i].size == sizeof(int))
      *(int *)field = (int)value;
    else
      *(size_t *)field = (size_t)value;
    return;
  }
  refuse("unknown key", key);
}

static void set_order(const char *text) {
  if (!strcmp(text, "at_once"))
    settings.order = ORDER_AT_ONCE;
  else if (!strcmp(text, "late"))
    settings.order = ORDER_LATE;
  else if (!strcmp(text, "seeded"))
    settings.order = ORDER_SEEDED;
  else
    refuse("order is at_once, late or seeded", text);
}

/* All devices are alike, so only how many are visible counts. An entry that names none ends the list, as in CUDA. */
static int visible_devices(int installed) {
  const char *list = getenv("CUDA_VISIBLE_DEVICES");
  if (!list) return installed;
  int visible = 0;
  while (*list) {
    if (!strncmp(list, "GPU-", 4)) {
      list += strcspn(list, ",");
    } else {
      char *end;
      long index = strtol(list, &end, 10);
      if (end == list || index < 0 || index >= installed) break;
      list = end;
    }
    visible++;
    if (*list == ',') list++;
  }
  return visible < installed ? visible : installed;
}

__attribute__((constructor)) static void read_settings(void) {
  const char *given = getenv(VARIABLE);
  if (!given) return;
  char *text = strdup(given), *rest = text;
  for (char *pair; (pair = strsep(&rest, ";"));) {
    char *value = strchr(pair, '=');
    if (!value) refuse("not key=value", pair);
    *value++ = 0;
    if (!strcmp(pair, "name"))
      snprintf(settings.name, sizeof settings.name, "%s", value);
    else if (!strcmp(pair, "order"))
      set_order(value);
    else
      set_number(pair, value);
  }
  free(text);
  if (settings.count > MAX_DEVICES) refuse("more devices than this build has", given);
  settings.installed = settings.count;
  settings.count = visible_devices(settings.installed);
}
